"""The benchmark: stock OpenEnv and Errata in alternating rounds on one machine; see docs/performance.md."""
