"""What a run costs before it starts: time and memory of a step."""
