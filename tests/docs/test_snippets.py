"""Every Python snippet of README.md and docs/ runs, and prints what the page says it prints.

The snippets of a page are one program, in order. A `text` block right after a snippet is what that
snippet prints. A snippet that imports pytest is a test file of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    if "```python" in page.read_text()
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END = "\x1e"  # between the outputs of two snippets


def snippets(page):
    """The page's snippets, each with the text that follows it, or None."""
    found, end = [], -1
    for match in BLOCK.finditer(page.read_text()):
        language, code = match.groups()
        if language == "python":
            found.append((code, None))
            end = match.end()
        elif language == "text" and found and not page.read_text()[end : match.start()].strip():
            found[-1] = (found[-1][0], code)
    return found


def run(folder, *command):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])}
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run_and_print_what_the_page_says(page, tmp_path):
    program = [(code, text) for code, text in snippets(page) if "import pytest" not in code]
    # The separator takes the empty line's place, so that line numbers are those of a reader's file.
    source = f'print("{END}")\n'.join(code for code, _ in program)
    (tmp_path / "example.py").write_text(source)
    printed = run(tmp_path, "example.py").split(f"{END}\n") if program else []
    for output, (code, text) in zip(printed, program, strict=True):
        assert text is None or output == text, code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_that_are_tests_pass(page, tmp_path):
    tests = [code for code, _ in snippets(page) if "import pytest" in code]
    for number, code in enumerate(tests):
        (tmp_path / f"test_{number}.py").write_text(code)
        run(tmp_path, "-m", "pytest", "-q", "-ppypto_spmd.testing.plugin", f"test_{number}.py")
