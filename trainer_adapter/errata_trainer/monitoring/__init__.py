"""What is logged while a model trains: metrics, the progress line, the table of completions, and warnings."""
