"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines are shared: how long an example took says nothing of it, and a slow one is no finding.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
