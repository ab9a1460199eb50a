"""Imports OpenEnv before any other module of the server does, without gradio, whose import takes seconds (decision
140)."""

from errata_protocol.late_imports import OPENENV_WEB_INTERFACE, import_without

import_without(*OPENENV_WEB_INTERFACE)
