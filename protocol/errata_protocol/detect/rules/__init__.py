"""The rules, in order of precedence: the first that fires decides the kind."""

from __future__ import annotations

from errata_protocol.detect.rules import arguments, build, code, commands, limits, network, patch, paths, runtime, tests
from errata_protocol.detect.rules.rule import Finding, Rule

RULES: tuple[Rule, ...] = (
    *network.RULES,
    *limits.RULES,
    *patch.RULES,
    *code.SYNTAX_RULES,
    *code.IMPORT_RULES,
    *tests.RULES,
    *build.RULES,
    *commands.RULES,
    *paths.PERMISSION_RULES,
    *paths.MISSING_RULES,
    *arguments.RULES,
    *runtime.RULES,
    *runtime.LAST_RULES,
)

__all__ = ["RULES", "Finding", "Rule"]
