"""Time and memory of one optimizer step."""
