"""Pictures and traces of timelines, simulated and measured alike."""
