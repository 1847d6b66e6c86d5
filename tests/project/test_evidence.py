"""docs/evidence.md is what the files of results say, and scripts write such files."""

import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from benchmark_rows import BENCHMARKS, FOLDERS

HERE = Path(__file__).parents[2]
PAGE = HERE / "docs" / "evidence.md"
# What goes into an experiment, and does not come out of it: settings, sizes, limits; a
# paper's number.
GIVEN = {"1.0", "0.001", "0.01", "0.0003", "0.02", "1.3"}
GIVEN |= {"99%"}  # a paper says so


VERSIONS = {
    json.loads(path.read_text(encoding="utf-8"))["versions"].get("jax")
    for path in BENCHMARKS.glob("*/results/*.json")
}
# Where another JAX runs, nothing is known of the programs, and nothing is marked.
of_this_jax = pytest.mark.skipif(
    {jax.__version__} != VERSIONS, reason="the results are of another JAX"
)


@pytest.fixture
def script(monkeypatch):
    """Return the function that imports a script with its folder on the path."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    return importlib.import_module


@pytest.fixture
def run(script, monkeypatch, tmp_path):
    """Return the function that runs a script, and returns the record it writes."""

    def run(name, *arguments):
        path = tmp_path / "result.json"
        command = [f"{name}.py", *arguments, "--json", str(path)]
        monkeypatch.setattr(sys, "argv", command)
        script(name).main()
        return script("record").read(path)

    return run


def rendered(script, records):
    evidence = script("evidence")
    return evidence.render(evidence.TEMPLATE.read_text(encoding="utf-8"), records)


@of_this_jax
def test_the_page_is_what_the_results_say(script):
    page = rendered(script, script("record").read_all())
    assert PAGE.read_text(encoding="utf-8") == page, (
        "docs/evidence.md is not what the results say; run "
        "`python benchmarks evidence`, and edit benchmarks/page/evidence.md."
    )


def record_of_all_forms(script, fingerprints):
    """Return a result that names every form, made by a program of these fingerprints."""
    record = script("record")
    names = list(script("fingerprints").FORMS)
    tables = {
        "all": [{"form": name if name != "amp" else "amp bf16"} for name in names]
    }
    return record.Record(
        date="2026-11-29",
        machine="2 CPU cores",
        versions={"jax": jax.__version__},
        command="python benchmarks demo",
        tables=tables,
        fingerprints=fingerprints,
    )


def test_a_result_is_of_the_program_whose_text_it_names(script):
    found = script("fingerprints")
    now = found.fingerprints()
    assert len(now) == len(found.FORMS) * len(found.PLATFORMS)
    assert found.stale({"all": record_of_all_forms(script, now)}) == {}
    other = now | {"amp on cpu": "another"}
    said = found.stale({"all": record_of_all_forms(script, other)})["all"]
    assert said.startswith("amp on cpu changed; `python benchmarks demo --json FILE`")
    # Of another version of JAX nothing is known, but a form without any is of no program.
    record = record_of_all_forms(script, other)
    elsewhere = dataclasses.replace(record, versions={"jax": "0.0.1"})
    assert found.stale({"all": elsewhere}) == {}
    del other["amp on cpu"]
    assert "amp on cpu" in found.stale({"all": elsewhere})["all"]


def test_a_run_that_goes_on_keeps_the_rows_of_this_program(script, tmp_path):
    found, path = script("fingerprints"), tmp_path / "result.json"
    made = record_of_all_forms(script, found.fingerprints() | {"amp on cpu": "another"})
    script("record").write(path, made)
    (rows,) = found.fresh_tables(path).values()
    assert [row["form"] for row in rows] == [x for x in found.FORMS if x != "amp"]
    script("record").write(path, dataclasses.replace(made, versions={"jax": "0.0.1"}))
    assert found.fresh_tables(path) == found.fresh_tables(tmp_path / "none") == {}


def test_stale_results_are_made_anew_the_cheapest_first(script, monkeypatch, tmp_path):
    """One that fails is left as it was, and what is not stale is not made."""
    make_all, record = script("all"), script("record")
    seconds = {"slow": 9.0, "quick": 1.0, "fails": 2.0, "fresh": 0.5}
    old = record_of_all_forms(script, {})
    paths = {name: tmp_path / f"{name}.json" for name in seconds}
    for name, path in paths.items():
        command = f"python benchmarks {name} --seeds 0"
        made = dataclasses.replace(old, seconds=seconds[name], command=command)
        record.write(path, made)
    ran = []

    def run(command):
        script_name, *options, _, path = command[2:]
        ran.append(script_name)
        assert options == ["--seeds", "0"]
        assert Path(path).read_bytes() == paths[script_name].read_bytes()
        Path(path).write_text("half" if script_name == "fails" else "whole")
        return subprocess.CompletedProcess(command, script_name == "fails")

    monkeypatch.setattr(record, "paths", lambda: paths)
    monkeypatch.setattr(make_all, "BUILD", tmp_path / "build")
    monkeypatch.setattr(subprocess, "run", run)
    stale = dict.fromkeys(("slow", "quick", "fails"), "amp on cpu changed; ...")
    monkeypatch.setattr(script("fingerprints"), "stale", lambda _: stale)
    monkeypatch.setattr(sys, "argv", ["all.py", "--stale"])
    with pytest.raises(SystemExit, match="not made: fails"):
        make_all.main()
    assert ran == ["quick", "fails", "slow"]
    assert paths["slow"].read_text() == paths["quick"].read_text() == "whole"
    assert record.read(paths["fails"]).seconds == 2.0
    # The next run goes on from what the interrupted one had.
    assert (tmp_path / "build" / "fails.json").read_text() == "half"


# A fault, by a file of the package, a text of it and another, and the forms whose
# programs it changes.
FAULTS = {
    "rounding of codes to nearest": (
        "compact/_codes.py",
        "lax.mul(uniform_numbers(values.shape, key), lax.sub(high, low))",
        "lax.mul(np.float32(0.5), lax.sub(high, low))",
        {"low-bit state"},
    ),
    "rounding of params biased upwards": (
        "compact/_rounding.py",
        "rises = lax.lt(lax.mul(numbers, np.float32(unit)), rest)",
        "rises = lax.lt(lax.mul(numbers, np.float32(unit - 1)), rest)",
        {"stochastic rounding"},
    ),
    "the last bit of a master to nearest": (
        "core/masters/_split.py",
        "if key is not None:",
        "if key is not None and False:",
        {"Split(8)"},
    ),
    "choices after the step": (
        "core/wrappers/_choose.py",
        'jaxpr = _choose_where_computed(call.params["jaxpr"], at)',
        'jaxpr = call.params["jaxpr"]',
        {"loss scale", "link", "release"},
    ),
    "16-bit updates taken for exact": (
        "core/masters/_transform.py",
        ">= max(32,",
        ">= min(16,",
        {"masters", "average", "offload", "zero1"},
    ),
    "no clipping in the second of two passes": (
        "release/_release.py",
        "value, _layers.times(grads, factor), layers",
        "value, grads, layers",
        {"release"},
    ),
    "products of amp as written": (
        "jaxprs/_primitives.py",
        "low         dot_general",
        "low         another_name",
        {"amp"},
    ),
    "an average of half the share": (
        "averages/_average.py",
        "incremental_update(weight, average, 1 - decay)",
        "incremental_update(weight, average, 0.5 * (1 - decay))",
        {"average"},
    ),
    "a smaller backoff": (
        "core/scaling/_loss_scaling.py",
        "backoff_factor: float = 0.5",
        "backoff_factor: float = 0.25",
        {"loss scale", "link"},
    ),
    "lines along another axis": (
        "compact/_quantized.py",
        "_MOST_UNEVEN, _FEWEST_FEATURES = 8, 128",
        "_MOST_UNEVEN, _FEWEST_FEATURES = 64, 128",
        {"low-bit state"},
    ),
    "remainders of float16 left out": (
        "core/masters/_split.py",
        "master = param + stored.astype(jnp.float32) * self._unit_of(param)",
        "master = param + 0 * stored.astype(jnp.float32) * self._unit_of(param)",
        {"Split(16)", "Split(8)"},
    ),
    "gradients of layers that stay scaled": (
        "release/_release.py",
        "of_layers = factor if unscale is None else factor * unscale",
        "of_layers = factor",
        {"release"},
    ),
    "the same keys for two transforms": (
        "core/masters/_transform.py",
        "_SALT = 2",
        "_SALT = 1",
        {"Split(8)"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_makes_the_results_of_its_forms_stale(fault, script, tmp_path):
    """And no others."""
    path, text, other, forms = FAULTS[fault]
    shutil.copytree(HERE / "optax_mp", tmp_path / "optax_mp")
    file = tmp_path / "optax_mp" / path
    source = file.read_text(encoding="utf-8")
    assert source.count(text) == 1
    file.write_text(source.replace(text, other), encoding="utf-8")
    # The folder of the tests is on the path, and with it the package as it is.
    program = (
        f"import sys; sys.path[:0] = {[str(tmp_path), *FOLDERS]!r}; "
        "import fingerprints; fingerprints.main()"
    )
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    now = dict(line.split(": ") for line in done.stdout.splitlines())
    before = script("fingerprints").fingerprints()
    changed = {x.split(" on ")[0] for x in before if now[x] != before[x]}
    assert changed == forms


def test_results_of_an_earlier_program_say_so(script, monkeypatch):
    evidence, records = script("evidence"), script("record").read_all()
    demo = {"demo": records["demo"]}
    template = "{demo.made} {demo.shown[0]} {demo[0][float32][seed]} {demo[9][x][y]}"
    monkeypatch.setattr(evidence, "figures", lambda _: {})
    monkeypatch.setattr(script("fingerprints"), "stale", lambda _: {"demo": "changed"})
    page = evidence.render(template, demo)
    assert ". **Of an earlier program.** **" in page
    assert "** (of an earlier program)\n\n| run |" in page
    assert page.endswith(" 1† (not made yet)")
    monkeypatch.setattr(script("fingerprints"), "stale", lambda _: {})
    page = evidence.render("{demo.made} {demo.tables} {demo[0][float32][seed]}", demo)
    assert "earlier" not in page and "†" not in page
    with pytest.raises(KeyError):
        evidence.render("{demo[9][x][y]}", demo)


@of_this_jax
def test_every_figure_of_the_pages_is_made_or_of_an_earlier_program(script, tmp_path):
    script("evidence").write_data(tmp_path)
    records = script("record").read_all()
    are_stale = bool(script("fingerprints").stale(records))
    for page in (PAGE, *tmp_path.iterdir()):
        is_made = "not made yet" not in page.read_text(encoding="utf-8")
        assert is_made or are_stale, page.name
    readme = PAGE.parents[1] / "README.md"
    assert "not made yet" not in readme.read_text(encoding="utf-8")


@of_this_jax
def test_the_figures_of_the_readme_are_what_the_results_say(script):
    evidence = script("evidence")
    readme = evidence.README.read_text(encoding="utf-8")
    template = evidence.README_FIGURES.read_text(encoding="utf-8")
    records = script("record").read_all()
    assert all(readme.count(mark) == 1 for mark in evidence.MARKS)
    assert readme == evidence.with_figures(readme, template, records), (
        "README's figures are not what the results say; run "
        "`python benchmarks evidence`, and edit benchmarks/page/readme_figures.md."
    )
    for row in records["demo"].rows:
        row["held-out loss"] = 9.876
    assert "| 9.876 |" in evidence.with_figures(readme, template, records)


@of_this_jax
def test_another_figure_in_a_result_is_another_figure_on_the_page(script):
    records = script("record").read_all()
    step = records["optimizer_step"]
    table = "16.8M weights in 4 leaves"
    row = script("record").row_of(step, table, "jmp's loop, float32")
    row["ratio"] = 4321.0
    assert rendered(script, records).count("4321.00") == 1


@of_this_jax
def test_every_result_is_on_a_page_of_data_with_command_date_and_machine(
    script, tmp_path
):
    script("evidence").write_data(tmp_path)
    pages = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    for path in BENCHMARKS.glob("*/results/*.json"):
        found, page = script("record").read(path), pages[path.parents[1].name]
        for said in (found.command, found.date, found.machine):
            assert said and said in page, path.name
        for title in found.tables:
            assert title[1:] in page, (path.name, title)


@of_this_jax
def test_every_table_of_results_on_the_page_has_a_title():
    """All but one, which is of claims."""
    page = PAGE.read_text(encoding="utf-8")
    earlier = r"( \(of an earlier program\))?"
    tables = re.findall(rf"^\*\*.+\*\*{earlier}\n\n\|", page, re.M)
    assert 1 < len(tables) == len(re.findall(r"^\|(---\|)+$", page, re.M)) - 1


def test_one_command_lists_every_script_with_its_run_time():
    command = [sys.executable, str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    listed = re.findall(r"^(\w+/\w+) +(.*\d .+?|not recorded)  ", done.stdout, re.M)
    assert len(listed) == len(done.stdout.splitlines())
    paths = [BENCHMARKS / f"{name}.py" for name, _ in listed]
    assert len(paths) > 15 and all(path.is_file() for path in paths)


def test_the_text_holds_no_measured_figure_that_is_typed():
    text = (BENCHMARKS / "page" / "evidence.md").read_text(encoding="utf-8")
    typed = re.sub(r"\{[^}]*\}|\(https:[^)]*\)", "", text)
    assert set(re.findall(r"\d+\.\d+|\d+ ?%", typed)) <= GIVEN


def test_results_are_as_their_scripts_write_them(script, tmp_path):
    record = script("record")
    for path in record.FOLDER.glob("*/results/*.json"):
        found = record.read(path)
        record.write(tmp_path / path.name, found)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
        assert re.match(r"python benchmarks \w+( |$)", found.command)
        # Results are beside their script.
        assert (path.parents[1] / f"{found.script}.py").is_file(), found.command
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", found.date)
        assert re.match(r"\d+ CPU cores|\d+ x |no machine: ", found.machine)
        assert found.versions and all(found.tables.values())


def test_a_thousand_updates_give_the_figures_of_the_page(run, script):
    committed = script("record").read_all()["stall"]
    assert run("stall").tables == committed.tables


@pytest.fixture
def short_training(monkeypatch, tmp_path):
    """Keep the pretrained weights of a short run apart from a user's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_no_benchmark_has_the_name_of_a_helper_of_tests():
    """One would be imported in place of the other."""
    helpers = {path.name for path in (HERE / "tests" / "support").glob("*.py")}
    assert helpers and helpers.isdisjoint(x.name for x in BENCHMARKS.glob("*/*.py"))


@pytest.mark.parametrize("name", ["convergence", "finetune", "language"])
def test_every_form_that_is_trained_can_be_made(script, name):
    """Also of a script that no test runs."""
    if name == "language":
        pytest.importorskip("orbax.checkpoint")
    forms = script(name).FORMS
    forms = forms.values() if isinstance(forms, dict) else forms
    for form in (getattr(form, "form", form) for form in forms):
        params = {"w": jnp.ones((8, 8), getattr(form, "param_dtype", "bfloat16"))}
        jax.eval_shape(form.wrap(optax.adamw(1e-3)).init, params)


@pytest.mark.slow
def test_widths_write_what_the_page_reads(run, script):
    rows, *_ = script("record").read_all()["width"].tables.values()
    found = run("width", "--models", "MLP", "--widths", "64", "--steps", "20").rows
    if "width" not in script("fingerprints").stale(script("record").read_all()):
        assert [row["form"] for row in found] == [row["form"] for row in rows]
    off = {row["form"]: row["width 64"] for row in found}
    assert off["masters"] < off["plain bf16"] / 5


@pytest.mark.slow
@pytest.mark.usefixtures("short_training")
def test_fine_tuning_writes_what_the_page_reads(run, script):
    committed = script("record").read_all()["finetune"]
    names = ["float32", "plain bf16", "masters, FullCopy"]
    settings = "--steps", "80", "--seeds", "0", "1"
    found = run("finetune", *settings, "--only", *names)
    assert list(found.tables) == list(committed.tables)
    ends = found.rows[: len(names)]
    assert [row["form"] for row in ends] == names
    assert ends[0].keys() == committed.rows[0].keys()
    float32, plain, masters = (row["losses"] for row in ends)
    for seed in range(2):
        assert plain[seed][0] > float32[seed][0] + 0.05
        assert abs(masters[seed][0] - float32[seed][0]) < 0.02


ABLATIONS = "finetune", "--ablations", "--steps", "80", "--seeds", "0", "--only"
SHORT = {
    "ablations": [*ABLATIONS, "compact, nearest codes"],
    "failures": ["failures", "--short", "--tables", "updates"],
}


@pytest.mark.slow
@pytest.mark.usefixtures("short_training")
@pytest.mark.parametrize("name", SHORT)
def test_a_short_run_writes_what_the_page_reads(name, run, script):
    committed = script("record").read_all()[name].tables
    for title, rows in run(*SHORT[name]).tables.items():
        columns = {next(iter(row.values())): row.keys() for row in committed[title]}
        for row in rows:
            assert row.keys() == columns[next(iter(row.values()))]


@pytest.mark.slow
def test_plots_draw_and_are_the_same_twice(script, tmp_path):
    pytest.importorskip("matplotlib")
    plots, records = script("plots"), script("record").read_all()
    pages = *(PAGE.parent / "guide").glob("*.md"), *BENCHMARKS.glob("page/*.md")
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    # `python benchmarks evidence` leaves those of earlier programs as they were, too.
    stale = script("fingerprints").stale(records).keys()
    for name, plot in plots.PLOTS.items():
        assert f"images/{name}.png)" in shown
        if stale & set(plot.records):
            continue
        first = plots.draw(name, records, tmp_path).read_bytes()
        assert len(first) > 10_000
        assert plots.draw(name, records, tmp_path).read_bytes() == first
