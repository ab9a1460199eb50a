"""What a teacher reads before a failing turn."""
