"""What cached KV is worth: time to first token by tier through the whole stack, and many dialogues in little memory."""
