"""What the `triptych` commands do, one file each."""
