"""The benchmark's own process plays stock environments, and shows no page of OpenEnv's: gradio takes seconds."""

from __future__ import annotations

from errata_protocol.late_imports import OPENENV_WEB_INTERFACE, import_without

import_without(*OPENENV_WEB_INTERFACE)
