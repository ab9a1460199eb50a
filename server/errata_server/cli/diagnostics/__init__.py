"""What ``errata doctor`` tries on this machine, and what it concludes from each answer."""
