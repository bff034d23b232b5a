from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
plot = ["matplotlib"]
hf = ["tokenizers"]
gguf = ["gguf", *hf]
lint = ["ruff", "mypy"]
test = ["pytest", "pytest-cov", "coverage>=7.10", "hypothesis", "transformers", "peft"]
test += [*lint, *plot, *gguf]

setup(
    name="llama",
    version="1.0.0",
    description="The reference inference library for Llama 2: any checkpoint, any machine",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["llama", "llama.*"]),
    # An editable install is then a path, in which Python finds the package before a mere folder of
    # the name llama, such as the clone itself for whoever works in the folder above it.
    package_dir={"": "."},
    package_data={"llama": ["py.typed", "kernels.c", "stories/*"]},
    install_requires=(here / "requirements.txt").read_text(encoding="utf-8").split(),
    extras_require={"plot": plot, "hf": hf, "gguf": gguf, "test": test},
)
