"""Every public bug report of cases.md names tests that exist, or says why a job cannot meet it."""

import ast
import pathlib
import re
import sys
import unittest

TESTS = pathlib.Path(__file__).resolve().parents[1]
TABLE = pathlib.Path(__file__).resolve().parent / "cases.md"
NOT_MET = "Cannot be met: "

# Every case of the collection.
EXPECTED_IDS = (
    "A01 A04 A05 A06 A08 A09 A10 A11 A12 A14 A15 A16 A17 A18 A19 A20 A21 "
    "B01 B03 B04 B05 B06 B07 B09 B10 B11 "
    "C02 C03 C04 C06 C07 C09 C10 C11 C12 C13 C14 C15 C16 C17 C18 C19 C20 C21 C22 "
    "D03 D04 D05 D06 D07 D08 D09 D11 D12 D13 D14 D15 "
    "E01 E02 E03 E04 E05 E06 E08 E09 E11 E12 E13 E14 E15 E16 E17 E18 "
    "F01 F02 F03 F04 F06 F07 F08 F09 F10 F11 "
    "G03 G04 G05 G06 G07 G08 G09 G10 G11 G12 G13 G14 G15 G16 "
    "H02 H03 H04 H05 H06 H07 H08 H09 H10 H11 H12 H13 H14 H15 H16 "
    "I01 I02 I03 I06 I07 I09 I10 I11 I12 I13 I14 I15 I16 I17 I18 "
    "J02 J03 J04 J05 J06 J07 J08 J09 J10 J11 J12 J13 J14 "
    "K01 K02 K04 K05 K07 K08 "
    "L01 L02 L03 L05 L06 L07 L08 "
    "M01 M02 M03 M04 M05 M06 M07").split()

ROW = re.compile(r"^\| ([A-Z]\d\d) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
NAME = re.compile(r"`(\w+\.\w+)`")
CPP_TEST = re.compile(r"\b(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\s*\)")


def tests_in_tree(root):
    """Suite.Name of every GoogleTest and unittest test below a directory."""
    names = set()
    for path in pathlib.Path(root).rglob("*"):
        if path.suffix in (".cc", ".h"):
            names |= {f"{suite}.{name}" for suite, name in CPP_TEST.findall(path.read_text())}
        elif path.suffix == ".py":
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    names |= {f"{node.name}.{item.name}" for item in node.body
                              if isinstance(item, ast.FunctionDef) and
                              item.name.startswith("test_")}
    return names


def problems_of(table, known_tests, expected_ids):
    rows = ROW.findall(table)
    problems = []
    for case_id in sorted(set(expected_ids) ^ {row[0] for row in rows}):
        problems.append(f"{case_id}: no row, or a row without a case")
    for case_id in sorted({row[0] for row in rows if [r[0] for r in rows].count(row[0]) > 1}):
        problems.append(f"{case_id}: more than one row")
    for case_id, _, _, cover in rows:
        names = NAME.findall(cover)
        if not names and not cover.startswith(NOT_MET):
            problems.append(f"{case_id}: neither a test nor '{NOT_MET.strip()}'")
        problems += [f"{case_id}: no test {name}" for name in names if name not in known_tests]
    return problems


class CasesTest(unittest.TestCase):
    def test_every_case_names_tests_that_exist(self):
        known = tests_in_tree(TESTS)
        self.assertGreater(len(known), 50, "the walk found no tests")
        problems = problems_of(TABLE.read_text(), known, EXPECTED_IDS)
        self.assertEqual(problems, [], "\n" + "\n".join(problems))

    def test_faults_of_the_table_are_found(self):
        row = "| A01 | [x](y) | subject | {} |\n"
        cases = [
            (row.format("`Suite.Rule`"), []),
            (row.format("`Suite.Rule`, `Other.Rule`"), ["A01: no test Other.Rule"]),
            (row.format("Cannot be met: no such `[N,1]` input"), []),
            (row.format("Cannot be met: see `Other.Rule`"), ["A01: no test Other.Rule"]),
            (row.format("later"), ["A01: neither a test nor 'Cannot be met:'"]),
            ("", ["A01: no row, or a row without a case"]),
            (2 * row.format("`Suite.Rule`"), ["A01: more than one row"]),
        ]
        for table, want in cases:
            with self.subTest(table):
                self.assertEqual(problems_of(table, {"Suite.Rule"}, ["A01"]), want)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
