"""What a client received, byte for byte, and the rewards that it posts later."""
