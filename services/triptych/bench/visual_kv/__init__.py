"""What the visual KV policies save, cost and lose, at a realistic shape."""
