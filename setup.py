from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
plot = ["matplotlib"]
hf = ["tokenizers"]
gguf = ["gguf", *hf]
serve = ["fastapi", "uvicorn", "prometheus_client"]
chat = ["prompt_toolkit"]
lint = ["ruff", "mypy"]
test = [
    "pytest",
    "pytest-cov",
    "coverage>=7.10",
    "hypothesis",
    "httpx",
    "transformers",
    "peft",
    "protobuf",
]
test += [*lint, *plot, *gguf, *serve, *chat]

setup(
    name="llama",
    version="1.0.0",
    description="The reference inference library for Llama: any checkpoint, any machine",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the llama reference contributors",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["llama", "llama.*"]),
    # An editable install is then a path, in which Python finds the package before a mere folder of
    # the name llama, such as the clone itself for whoever works in the folder above it.
    package_dir={"": "."},
    package_data={"llama": ["py.typed", "kernels.c", "server/page.html", "stories/*"]},
    install_requires=(here / "requirements.txt").read_text(encoding="utf-8").split(),
    entry_points={"console_scripts": ["llama = llama.__main__:main"]},
    extras_require={
        "plot": plot,
        "hf": hf,
        "gguf": gguf,
        "serve": serve,
        "chat": chat,
        "all": [*plot, *gguf, *serve, *chat],
        "test": test,
    },
)
