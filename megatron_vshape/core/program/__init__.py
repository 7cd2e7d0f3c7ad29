"""Programs: the instructions of every device, with P2P messages, and proofs of deadlock freedom."""
