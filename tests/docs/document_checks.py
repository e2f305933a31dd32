"""What can be said of a block without running it: its syntax, and that what it names exists.

Commands are parsed with the program's own parser, keys are looked up in the configuration types,
scripts and their options in the repository, imported names in the package. Each check returns the
complaints it has, so that a page's mistakes are seen together.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import tomllib
import typing
from collections.abc import Iterator

import yaml
from pydantic import BaseModel, ValidationError

from dora_rl import cli
from dora_rl.commands import testbed
from dora_rl.config import RunConfig
from dora_rl.types import UserError
from tests.docs.document_blocks import Block
from tests.kit.places import ROOT

# Commands of a block that are not ours: named here so that a misspelt one is noticed.
OTHERS = re.compile(
    r"bash|cat|cd|cp|curl|cut|docker|echo|export|git|grep|head|hostname|jq|kill|ls|mkdir|nvidia-smi|pip|ray|rm|sed|"
    r"sleep|source|srun|ssh|tail|tensorboard|torchrun|uv|wait"
)
_HEREDOC = re.compile(r"<<-?\s*'?\"?(\w+)'?\"?(.*?)\n(.*?)^\1$", re.DOTALL | re.MULTILINE)


def complaints(block: Block) -> list[str]:
    """Everything that is wrong with a block as it stands."""
    checks = {"bash": bash, "python": python, "toml": toml, "json": json_text, "yaml": yaml_text}
    check = checks[block.language]
    return [f"{block.place}: {line}" for line in check(block.text)]


def bash(text: str) -> Iterator[str]:
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if checked.returncode:
        yield checked.stderr.strip()
        return
    for words in commands(text):
        yield from _command(words)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command; heredocs, comments and redirections left out."""
    text = _HEREDOC.sub(r"\2", text).replace("\\\n", " ")
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        words: list[str] = []
        skip = False
        for word in [*lexer, ";"]:
            if word in ("&&", "||", "|", ";", "&", "(", ")"):
                while words and re.match(r"^\w+=", words[0]):
                    words.pop(0)  # variables set for the command
                if words:
                    yield words
                words = []
            elif word and set(word) <= set("<>&"):
                skip = True  # the file of a redirection comes next
            elif skip:
                skip = False
            else:
                words.append(word)


def _command(words: list[str]) -> Iterator[str]:
    name = words[0].rpartition("/")[2]
    for word in words[1:]:
        if re.match(r"^(recipes|benchmarks|docs)/[\w./-]+$", word) and not (ROOT / word).exists():
            yield f"there is no {word}"
    if name == "dora-rl":
        yield from dora(words[1:])
    elif name in ("python", "python3"):
        yield from _script(words[1:])
    elif name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wanted = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        yield from (f"make has no target {word}" for word in wanted if word not in targets)
    elif not OTHERS.fullmatch(name):
        yield f"unknown command {words[0]!r}; enter it in OTHERS if it is meant"


def dora(arguments: list[str]) -> Iterator[str]:
    """`dora-rl …`: command, options, configuration keys and simulator keys exist."""
    if any(word in ("--help", "--version") for word in arguments):
        return
    try:
        args = cli._parse(arguments)
        if args is None:
            return
        if hasattr(args, "preset"):
            testbed.preset_of(args)
    except UserError as error:
        yield f"dora-rl {' '.join(arguments)}: {error}"
        return
    for override in getattr(args, "overrides", ()):
        key = override.partition("=")[0]
        if not has_key(RunConfig, key.split(".")):
            yield f"there is no configuration key {key}"


def has_key(kind: type[BaseModel], parts: list[str]) -> bool:
    if not parts or parts[0] not in kind.model_fields:
        return False
    inner = kind.model_fields[parts[0]].annotation
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return len(parts) == 1 or has_key(inner, parts[1:])
    return len(parts) == 1 or typing.get_origin(inner) is dict


def _script(words: list[str]) -> Iterator[str]:
    if words[:1] == ["-m"]:
        if words[1].startswith("dora_rl") and not _imports(words[1]):
            yield f"there is no module {words[1]}"
        return
    if not words or not words[0].endswith(".py"):
        return
    path = ROOT / words[0]
    if words[0].startswith(("benchmarks/", "recipes/", "tests/")) and path.is_file():
        text = path.read_text()
        for word in words[1:]:
            option = word.partition("=")[0]
            if option.startswith("--") and option != "--help" and f'"{option}"' not in text:
                yield f"{words[0]} has no option {option}"


def python(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield f"line {error.lineno}: {error.msg}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dora_rl"):
            module = _imports(node.module or "")
            for alias in node.names:
                if module is None or not hasattr(module, alias.name):
                    yield f"there is no {node.module}.{alias.name}"


def _imports(name: str) -> object | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def toml(text: str) -> Iterator[str]:
    """A part of a configuration: every key exists, every value has its kind."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        yield str(error)
        return
    try:
        RunConfig.model_validate({"model": {"path": "any"}} | document)
    except ValidationError as error:
        for one in error.errors():
            yield f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}"


def json_text(text: str) -> Iterator[str]:
    for line in text.splitlines() if "\n{" in text else [text]:
        try:
            json.loads(line)
        except json.JSONDecodeError as error:
            yield str(error)


def yaml_text(text: str) -> Iterator[str]:
    try:
        list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        yield " ".join(str(error).split())
