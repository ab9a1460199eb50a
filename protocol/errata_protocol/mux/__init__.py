"""Room of the multiplexed protocol (PROTOCOL D): its envelope and state machines live here. Empty until they do."""
