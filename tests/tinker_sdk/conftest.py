from importlib.util import find_spec

if find_spec("tinker") is None:
    collect_ignore_glob = ["test_*.py"]
