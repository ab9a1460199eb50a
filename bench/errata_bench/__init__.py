"""The benchmark: measures stock OpenEnv and Errata in alternating rounds on one machine (docs/performance.md)."""
