"""The commands and programs of README.md and docs/*.md, for the tests that run them as they stand there.

What a reader sees decides what is done:

- An indented block holds commands, one a line; a line that ends with a backslash goes on. A block of anything else is
  fenced and says its language: `python`, `yaml`, `text`.
- A command is run, in a folder that holds what a checkout holds, after those above it in the same document.
- A comment that says what it *needs* ("needs a registry"), how long it *takes* ("takes 15 minutes"), or that a part of it is
  *yours* ("train.py is yours") marks it: it is not run, and only checked for words that do not exist. So it is with the commands
  below a line that is such a comment, to the end of the block.
- A block with `--image local/host` is run on the tests' own cluster.
- Below "In another terminal, while it runs", or "In the second terminal:", are commands that are typed while the one before them runs.
- A Python block below a paragraph that ends with the name of a file is that file.
- docs/tutorial.md is typed by a test of its own, which also waits for what its `text` blocks show, and makes the change of its `diff` block.
"""
