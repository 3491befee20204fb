"""Every code block of README and docs/ is tried, or named with the reason why not."""

from __future__ import annotations

from suites.docs.blocks import BLOCKS, LANGUAGES, NOT_RUN, PAGES, TRIED, blocks_in, commands, languages_of, missing

PAGE = """
```python
one = 1
```

```{toctree}
page
```

- in a list:

  ```bash
  make plans  # a word
  ```
"""


def test_every_block_says_a_language_that_is_tried() -> None:
    assert [block.where for block in BLOCKS if block.language not in LANGUAGES] == []
    assert languages_of(TRIED) == LANGUAGES


def test_all_pages_are_read() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/tutorial.md", "docs/howto/packer.md", "docs/reference/plan.md"} <= {*PAGES}
    assert len(TRIED) + len(NOT_RUN) == len(BLOCKS)
    assert len(NOT_RUN) == 4


def test_what_is_not_run_is_there_and_has_a_reason() -> None:
    for one in NOT_RUN:
        assert len([block for block in BLOCKS if one.names(block)]) == 1, one.page
        assert len(one.reason.split()) > 5, one.page


def test_blocks_are_found_within_lists_too_and_directives_are_none() -> None:
    first, second = blocks_in("page.md", PAGE)
    assert (first.language, first.text, first.line) == ("python", "one = 1\n", 2)
    assert (second.language, commands(second)) == ("bash", [("make plans", "")])


def test_what_is_shown_must_be_printed_in_its_order_by_whole_lines() -> None:
    printed = "one\ntwo lines\nthree\nfour\n"
    assert missing(printed, "one\n...\nthree\nfour\n") == ""
    assert missing(printed, "...\nthree\n...\ntwo lines\n") == "two lines"
    assert missing(printed, "two\n") == "two"
    assert missing(printed, "four\nfive\n") == "four\nfive"


def test_a_readme_is_read_in_a_few_minutes() -> None:
    from suites.docs.blocks import ROOT

    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
