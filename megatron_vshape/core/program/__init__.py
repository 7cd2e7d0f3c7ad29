"""What every device does: a schedule with the messages between its passes, and their proofs."""
