"""The table of families: its names are those of transformers, and each fact stands in it alone."""

import ast
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING

from verl_tree.families import FAMILIES, MIXERS, RECURRENT_TYPES

ROOT = Path(__file__).parents[2]
NOT_IN_TRANSFORMERS = {"kimi_linear"}


def test_types_and_mixers_are_names_of_transformers() -> None:
    for family in FAMILIES:
        for model_type in set(family.model_types) - NOT_IN_TRANSFORMERS:
            assert model_type in CONFIG_MAPPING, family.name
    models = Path(transformers.__file__).parent / "models"
    for model_type, mixers in {family.model_types[0]: family.mixers for family in FAMILIES}.items():
        written = "".join(path.read_text() for path in models.glob(f"{model_type}*/modeling_*.py"))
        assert {mixer for mixer in mixers if f"class {mixer}(" not in written} == set()


def test_a_family_is_in_the_table_once_and_says_what_it_needs() -> None:
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types))
    for family in FAMILIES:
        assert bool(family.mixers) == (family.mixing is not None)
        assert bool(family.mixers) + family.reads_images + bool(family.refused) == 1, family.name


def test_no_other_product_file_names_a_family() -> None:
    """Docstrings and messages may speak of families; the code compares with no type and no mixer."""
    names = {*MIXERS, *(model_type for family in FAMILIES for model_type in family.model_types)}
    found = {
        f"{path.relative_to(ROOT)}: {node.value}"
        for package in ("verl_tree", "rollout_hooks")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "families.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert found == set()
    assert RECURRENT_TYPES
