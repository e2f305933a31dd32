"""dora-rl from a program: `dora_rl.train`, the `Run` that it returns, `dora_rl.Engine`.

Above everything else, like the command line; nothing of it is imported with `import dora_rl`.
"""
