"""Names of well-known programs and Python modules. Where one is missing, the machine lacks it, and the agent is not to
blame."""

from __future__ import annotations

_NAMES = """
PIL R Rscript aiohttp ansible aws bats bs4 bun bundle cargo clang cmake composer conda cv2 cypress deno django
docker dotnet duckdb fastapi ffmpeg flask g++ gcc gem gh go gradle helm httpx java javac jax jest jq jsonschema
julia kubectl lua lxml matplotlib mocha mvn mysql nc networkx nginx ninja node nose2 npm npx numpy nvcc openpyxl
openssl pandas perl php playwright pnpm podman poetry polars psql psutil psycopg2 pyarrow pydantic pymongo pytest
python python3 redis-cli requests rich rsync ruby rustc scipy selenium shellcheck sklearn socat sqlalchemy sqlite3
ssh strace swift sympy tcpdump tensorflow terraform tmux torch tox tqdm transformers uv uvx valgrind yaml yarn yq
zig
"""

WELL_KNOWN = frozenset(_NAMES.split())
