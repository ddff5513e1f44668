"""The router: takes chats with pictures, has the pictures encoded, has the worker answer, relays its words."""
