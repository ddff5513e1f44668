"""`triptych bench peers`: our stack beside the engines that users would pick instead, same model, client and moment."""
