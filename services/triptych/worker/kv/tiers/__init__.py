"""Where KV blocks lie below the device: host memory, disk, and a server that several workers share."""
