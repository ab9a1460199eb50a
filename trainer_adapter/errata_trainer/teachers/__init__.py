"""Other models that are asked what they would have done, and the votes they make."""
