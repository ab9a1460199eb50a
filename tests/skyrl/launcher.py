"""SkyRL 0.3.0's Tinker server on a CPU: ``python launcher.py MODEL PORT DIRECTORY``, in SkyRL's environment.

It changes nothing in the package but how its engine is started, which would be by ``uv run``.
"""

import runpy
import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic wants it below Python 3.12

if sys.argv[1] == "engine":
    sys.argv[:] = ["engine", *sys.argv[2:]]
    runpy.run_module("skyrl.tinker.engine", run_name="__main__")
else:
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, config_to_argv

    model, port, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    api._build_uv_run_cmd_engine = lambda parent, config: [
        sys.executable,
        __file__,
        "engine",
        *config_to_argv(config),
    ]
    api.app.state.engine_config = EngineConfig(
        base_model=model,
        backend="jax",
        backend_config={"max_lora_adapters": 4, "max_lora_rank": 8},
        checkpoints_base=f"{directory}/checkpoints",
        database_url=f"sqlite:///{directory}/tinker.db",
    )
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")
