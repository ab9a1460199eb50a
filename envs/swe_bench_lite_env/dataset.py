"""Instances in the schema of SWE-bench, read from files or the Hugging Face hub; filters, seeds, shards."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, date, datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from errata_protocol.bounded_json import decode
from errata_protocol.errors import InvalidRequest, NotSupported
from errata_protocol.exception_text import named_text_of
from errata_protocol.install_hint import DISTRIBUTION, install_hint
from errata_protocol.names import INSTANCE, REPOSITORY
from errata_protocol.printable import printable

from .input_files import FileRefused, json_lines, json_values, open_regular

LITE = "SWE-bench/SWE-bench_Lite"
"""Name of SWE-bench Lite on the Hugging Face hub; ``lite`` means it too."""

TEST_SPLIT = "test"
"""The split for evaluation: loaded only if it is asked for by name."""

LOCAL_SPLIT = "local"
"""Name of the rows of a file that says of no row which split it is of."""

_SHOWN_PROBLEMS = 5
_MAX_BATCH_BYTES = 1024**3
_PYTHON_LIST = re.compile(
    r"""\s*+[\[(](?:\s*+(?:'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+")\s*+,?+)*+\s*+[\])]\s*+""", re.DOTALL
)
"""A list or tuple of texts as Python writes it. `ast` is given nothing else: deep nesting can end the process."""
_SUFFIXES = (".jsonl", ".json", ".parquet")


class DatasetInvalid(InvalidRequest):
    """Rows that cannot be used; the message names the row and the column of each."""


class UnknownInstance(InvalidRequest, LookupError):
    """The data set has no instance of that id."""


class UnknownSplit(InvalidRequest, LookupError):
    """The data set has no split of that name."""


class EvaluationSplitWarning(UserWarning):
    """The split ``test`` was loaded: what is trained on it cannot be evaluated with it."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One row of a data set. Only `public` may leave the server; ``repr`` shows nothing else.

    Args:
        repo: Repository, ``owner/name``.
        instance_id: Id of the instance; unique in its data set and safe as a file name.
        base_commit: Commit that the issue was reported against; empty where the row names none.
        patch: Gold patch, a unified diff.
        test_patch: Changes of tests that show the issue; empty where the tests stand in the tree already.
        problem_statement: Text of the issue, which the agent reads.
        hints_text: Comments on the issue from before the fix.
        created_at: Time of the pull request, ISO 8601; empty where unknown.
        version: Version of the repository that its specification goes by.
        environment_setup_commit: Commit whose requirements the benchmark installs.
        fail_to_pass: Tests that the gold patch repairs.
        pass_to_pass: Tests that have to stay whole.
        log_parser: Parser that the row names (swebench 5), e.g. ``parse_log_pytest``; empty uses the repository's.
        eval_type: Kind of evaluation: ``pass_and_fail``, or ``fail_only`` for runners that report failures only
            (swebench 5).
        split: The split that the row was read from.
        image: Name of the image that the row names as its own; empty where it names none.
    """

    repo: str
    instance_id: str
    base_commit: str = field(repr=False)
    patch: str = field(repr=False)
    test_patch: str = field(repr=False)
    problem_statement: str = field(repr=False)
    hints_text: str = field(repr=False)
    created_at: str = field(repr=False)
    version: str = field(repr=False)
    environment_setup_commit: str = field(repr=False)
    fail_to_pass: tuple[str, ...] = field(repr=False)
    pass_to_pass: tuple[str, ...] = field(repr=False)
    log_parser: str = field(default="", repr=False)
    eval_type: str = field(default="pass_and_fail", repr=False)
    split: str = field(default=LOCAL_SPLIT, repr=False)
    image: str = field(default="", repr=False)

    def public(self) -> dict[str, str]:
        """Return what may leave the server."""
        return {
            "instance_id": self.instance_id,
            "repo": self.repo,
            "problem_statement": self.problem_statement,
        }

    def excluding(self, pass_to_pass: Collection[str]) -> Instance:
        """Return the instance without the tests of PASS_TO_PASS that a recipe excludes.

        Raises:
            InvalidRequest: PASS_TO_PASS has no such test.
        """
        unknown = sorted(set(pass_to_pass) - set(self.pass_to_pass))
        if unknown:
            raise InvalidRequest(f"{self.instance_id}: {unknown[0]!r} is to be excluded and is not in PASS_TO_PASS")
        return replace(self, pass_to_pass=tuple(test for test in self.pass_to_pass if test not in pass_to_pass))

    def row(self) -> dict[str, str]:
        """Return the row in the benchmark's schema: every value is a string, the two lists of tests are JSON.

        Fields that the schema does not have are left out: ``log_parser``, ``eval_type``, ``split`` and ``image``.
        """
        row: dict[str, str] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("fail_to_pass", "pass_to_pass"):
                row[item.name.upper()] = json.dumps(list(value))
            elif item.name not in ("log_parser", "eval_type", "split", "image"):
                row[item.name] = value
        return row

    @property
    def digest(self) -> str:
        """sha256 over what shapes the start, the grading and its validation: all but the texts that are read."""
        graded = (
            self.repo,
            self.instance_id,
            self.base_commit,
            self.patch,
            self.test_patch,
            self.version,
            self.log_parser,
            self.eval_type,
            self.fail_to_pass,
            self.pass_to_pass,
        )
        return f"sha256:{hashlib.sha256(json.dumps(graded).encode()).hexdigest()}"


class Dataset(Sequence[Instance]):
    """Instances in a fixed order. Every method that chooses some of them returns a new `Dataset`.

    Args:
        instances: Instances with distinct ids.
        name: Name in error messages: a path or a name on the hub.

    Raises:
        DatasetInvalid: Two instances have the same id.
    """

    def __init__(self, instances: Iterable[Instance], name: str = "the data set") -> None:
        self._instances = tuple(instances)
        self._by_id = {instance.instance_id: instance for instance in self._instances}
        self.name = name
        if len(self._by_id) < len(self._instances):
            counts = Counter(instance.instance_id for instance in self._instances)
            twice = sorted(one for one, count in counts.items() if count > 1)
            raise DatasetInvalid(f"{name}: {', '.join(twice[:5])} occur more than once: keep one row of each")

    def __len__(self) -> int:
        return len(self._instances)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances)

    def __getitem__(self, index: Any) -> Any:
        return self._instances[index]

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._by_id or instance_id in self._instances

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {len(self)} instances)"

    @property
    def ids(self) -> list[str]:
        """All instance ids, in order."""
        return list(self._by_id)

    @property
    def splits(self) -> dict[str, Dataset]:
        """The instances of each split, in the order in which the splits first occur."""
        groups: dict[str, list[Instance]] = {}
        for instance in self._instances:
            groups.setdefault(instance.split, []).append(instance)
        return {name: Dataset(group, self.name) for name, group in groups.items()}

    def find(self, instance_id: str) -> Instance:
        """Return the instance of that id.

        Raises:
            UnknownInstance: There is none.
        """
        if instance_id not in self._by_id:
            raise UnknownInstance(
                f"no instance {instance_id!r} in {self.name}: it has {len(self)}, {some(self.ids)}",
                instance_id=instance_id,
            )
        return self._by_id[instance_id]

    def select(
        self,
        *,
        repos: Collection[str] = (),
        versions: Collection[str] = (),
        instance_ids: Collection[str] = (),
        created_from: str | date | None = None,
        created_before: str | date | None = None,
        where: Callable[[Instance], bool] | None = None,
    ) -> Dataset:
        """Return the instances that meet every condition given, in the same order.

        Args:
            repos: Repositories to choose from, ``owner/name``; empty for all.
            versions: Versions to choose from; empty for all.
            instance_ids: Ids to choose from, each of which has to exist; empty for all.
            created_from: Earliest ``created_at``, inclusive; ISO 8601, UTC where it names no zone. None for no bound.
            created_before: End of the range of ``created_at``, exclusive; None for no bound. A row without
                ``created_at`` is in no range.
            where: Function that tells whether an instance meets a further condition; None for no such condition.

        Raises:
            UnknownInstance: One of ``instance_ids`` is not there.
            InvalidRequest: A bound is not a time.
        """
        for instance_id in instance_ids:
            self.find(instance_id)
        lower, upper = _moment(created_from, "created_from"), _moment(created_before, "created_before")

        def chosen(instance: Instance) -> bool:
            if (repos and instance.repo not in repos) or (versions and instance.version not in versions):
                return False
            if instance_ids and instance.instance_id not in instance_ids:
                return False
            if lower is not None or upper is not None:
                created = _moment(instance.created_at or None, "created_at")
                if created is None or (lower and created < lower) or (upper and created >= upper):
                    return False
            return where is None or where(instance)

        return Dataset(filter(chosen, self._instances), self.name)

    def shuffled(self, seed: int) -> Dataset:
        """Return the instances in an order that the seed and the ids decide: what else is chosen does not change it."""

        def key(instance: Instance) -> bytes:
            return hashlib.sha256(f"{seed}\0{instance.instance_id}".encode()).digest()

        return Dataset(sorted(self._instances, key=key), self.name)

    def shard(self, index: int, count: int) -> Dataset:
        """Return part ``index`` of ``count``, from 0. The parts share no instance and leave none out.

        Raises:
            InvalidRequest: There is no such part.
        """
        if count < 1 or not 0 <= index < count:
            raise InvalidRequest(f"shard {index} of {count}: shards of {count} are 0..{count - 1}")
        return Dataset(self._instances[index::count], self.name)


def read_row(row: Mapping[str, Any], where: str = "row", split: str = LOCAL_SPLIT) -> Instance:
    """Return the instance that a row of the schema describes.

    ``instance_id``, ``repo``, ``problem_statement`` and ``FAIL_TO_PASS`` are needed; columns that it does not know are
    left alone. The lists of tests may be lists, or text that holds one as JSON or as a Python literal.

    Args:
        row: Values by column.
        where: Name of the row in error messages.
        split: Split of a row that does not name one.

    Raises:
        DatasetInvalid: A column is missing or cannot be read.
    """
    row = {_LOWER.get(name, name): value for name, value in row.items()}

    def text(name: str, needed: bool = False) -> str:
        value = row.get(name)
        if value is None or value == "":
            if needed:
                raise DatasetInvalid(f"{where}: column {name} is missing or empty")
            return ""
        if isinstance(value, datetime | date):
            return value.isoformat()
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        raise DatasetInvalid(f"{where}: column {name} holds {type(value).__name__}: it has to be text")

    instance_id, repo = text("instance_id", True), text("repo", True)
    if not INSTANCE.matches(instance_id):
        raise DatasetInvalid(
            f"{where}: column instance_id is {instance_id[:80]!r}: letters, digits and . _ + - only, at most 200"
        )
    if not REPOSITORY.matches(repo):
        raise DatasetInvalid(f"{where}: column repo is {repo[:80]!r}: it has to be owner/name")
    created_at = text("created_at")
    try:
        _moment(created_at or None, "created_at")
    except InvalidRequest as error:
        raise DatasetInvalid(f"{where}: column created_at: {error}") from None
    fail_to_pass = _tests(row.get("FAIL_TO_PASS"), f"{where}: column FAIL_TO_PASS")
    if not fail_to_pass:
        raise DatasetInvalid(f"{where}: column FAIL_TO_PASS names no test: without one nothing tells a fix from none")
    eval_type = text("eval_type") or "pass_and_fail"
    if eval_type not in ("pass_and_fail", "fail_only"):
        raise DatasetInvalid(f"{where}: column eval_type is {eval_type!r}: it has to be pass_and_fail or fail_only")
    return Instance(
        repo=repo,
        instance_id=instance_id,
        base_commit=text("base_commit"),
        patch=text("patch"),
        test_patch=text("test_patch"),
        problem_statement=text("problem_statement", True),
        hints_text=text("hints_text"),
        created_at=created_at,
        version=text("version"),
        environment_setup_commit=text("environment_setup_commit"),
        fail_to_pass=fail_to_pass,
        pass_to_pass=_tests(row.get("PASS_TO_PASS"), f"{where}: column PASS_TO_PASS"),
        log_parser=text("log_parser"),
        eval_type=eval_type,
        split=text("split") or split,
        image=text("image_name") or text("docker_image"),
    )


def load_dataset(
    source: str | Path, split: str | None = None, *, broken: MutableMapping[str, str] | None = None
) -> Dataset:
    """Read a data set in the schema of SWE-bench.

    Args:
        source: A ``.jsonl``, ``.json`` or ``.parquet`` file; a directory of such files, named after their splits
            (``dev.parquet``, ``data/test-00000-of-00001.parquet``); or a name on the Hugging Face hub, ``lite`` being
            `LITE`. A path that exists comes before a name.
        split: The split to read. Without it, all but ``test``. A file that does not say of which split its rows are
            is the split that is asked for, and `LOCAL_SPLIT` without one.
        broken: Mapping that gets the reason why a row cannot be used, by the row's place; such rows are left out. If
            None, such a row is an error, because figures over the remaining rows would be of another data set.

    Raises:
        DatasetInvalid: Rows cannot be used, and ``broken`` is None; or a file cannot be read on.
        UnknownSplit: There is no such split; or ``split`` is None and there is no split but ``test``.
        InvalidRequest: The file is missing or unreadable.
        NotSupported: ``pyarrow`` or ``datasets`` is missing, or the hub cannot be reached.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        rows = _directory_rows(path, split)
    elif path.exists():
        rows = _file_rows(path, split or _split_of(path) or LOCAL_SPLIT)
    elif path.suffix in _SUFFIXES or str(source).startswith((".", "/", "~")):
        raise InvalidRequest(f"{path}: no such file: name a .jsonl, .json or .parquet file, or a data set of the hub")
    else:
        rows = _hub_rows(LITE if str(source).lower() in ("lite", "swe-bench_lite") else str(source), split)
    problems: dict[str, str] = {}
    instances: list[Instance] = []
    seen: dict[str, str] = {}
    for where, row, row_split in rows:
        try:
            if isinstance(row, DatasetInvalid):
                raise row
            if not isinstance(row, Mapping):
                raise DatasetInvalid(f"{where}: holds {type(row).__name__}: every row has to be an object")
            instance = read_row(row, where, row_split)
            if instance.instance_id in seen:
                raise DatasetInvalid(
                    f"{where}: column instance_id repeats {seen[instance.instance_id]}: {instance.instance_id}"
                )
        except DatasetInvalid as error:
            problems[where] = printable(error)
        except Exception as error:  # of a parser: it is contained to this row all the same
            problems[where] = printable(f"{where}: cannot be read ({named_text_of(error)})")
        else:
            seen[instance.instance_id] = where
            instances.append(instance)
    if broken is not None:
        broken.update(problems)
    elif problems:
        more = len(problems) - _SHOWN_PROBLEMS
        listed = list(problems.values())
        shown = "; ".join(listed[:_SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise DatasetInvalid(f"{source}: {shown}", problems=listed[:100])
    return _of_split(instances, str(source), split)


_LOWER = {"fail_to_pass": "FAIL_TO_PASS", "pass_to_pass": "PASS_TO_PASS"}
_Row = tuple[str, Any, str]
"""What errors call it, its values, its split where it does not say it."""


def _of_split(instances: list[Instance], source: str, split: str | None) -> Dataset:
    there = sorted({instance.split for instance in instances})
    if split is None:
        chosen = [instance for instance in instances if instance.split != TEST_SPLIT]
        if instances and not chosen:
            raise UnknownSplit(
                f"{source} has the split {TEST_SPLIT} only, which is for evaluation: ask for it by name", known=there
            )
        return Dataset(chosen, source)
    chosen = [instance for instance in instances if instance.split == split]
    if not chosen:
        raise UnknownSplit(f"{source} has no split {split!r}: it has {', '.join(there) or 'no rows'}", known=there)
    if split == TEST_SPLIT:
        warnings.warn(
            f"{source}: the split {TEST_SPLIT} is for evaluation; a model trained on it cannot be evaluated with it",
            EvaluationSplitWarning,
            stacklevel=3,
        )
    return Dataset(chosen, source)


def _file_rows(path: Path, split: str) -> Iterator[_Row]:
    if path.suffix == ".parquet":
        values = _parquet(path)
    elif path.suffix in (".jsonl", ".json"):
        values = _json_lines(path) if path.suffix == ".jsonl" else _json(path)
    else:
        raise InvalidRequest(f"{path}: a data set is a .jsonl, .json or .parquet file")
    for number, row in values:
        yield f"{path.name} row {number}", row, split


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        for number, line in json_lines(path):
            try:
                yield number, decode(line)
            except ValueError as error:
                yield number, DatasetInvalid(f"{path.name} row {number} is no JSON: {error}")
    except FileRefused as error:
        raise DatasetInvalid(error.message) from error


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json_values(path)
    except FileRefused as error:
        raise DatasetInvalid(error.message) from error
    except ValueError as error:
        raise DatasetInvalid(f"{path}: no JSON: {error}") from error
    if isinstance(rows, dict):
        rows = list(rows.values())
    if not isinstance(rows, list):
        raise DatasetInvalid(f"{path}: it has to hold a list of rows, or an object of them by id")
    yield from enumerate(rows, 1)


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise NotSupported(f"{path}: Parquet needs pyarrow: {install_hint('parquet', _came_from())}") from error
    try:
        with open_regular(path) as opened, parquet.ParquetFile(opened) as file:
            number = 0
            # Few rows at a time: in a Parquet file a long text may stand once for all rows.
            for batch in file.iter_batches(batch_size=16):
                if batch.nbytes > _MAX_BATCH_BYTES:
                    raise DatasetInvalid(f"{path}: rows {number + 1} to {number + 16} are larger than 1 GiB")
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except FileRefused as error:
        raise DatasetInvalid(error.message) from error
    except (ArrowException, OSError, ValueError) as error:
        raise DatasetInvalid(f"{path}: no Parquet: {error}") from error


def _came_from() -> str | None:
    try:
        return distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:  # run from a source tree
        return None


def _split_of(path: Path) -> str | None:
    """Return the split that a file's name says: ``test-00000-of-00001.parquet`` and ``test.jsonl`` are ``test``."""
    name = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return name if name in ("train", "dev", "validation", TEST_SPLIT) else None


def _directory_rows(path: Path, split: str | None) -> Iterator[_Row]:
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    named = {file: _split_of(file) or re.sub(r"-\d{5}-of-\d{5}$", "", file.stem) for file in files}
    if not files:
        raise InvalidRequest(f"{path}: no .jsonl, .json or .parquet file below it")
    wanted = [file for file in files if split is None or named[file] == split]
    if not wanted:
        known = sorted(set(named.values()))
        raise UnknownSplit(f"{path} has no split {split!r}: it has {', '.join(known)}", known=known)
    if split is None:
        wanted = [file for file in files if named[file] != TEST_SPLIT]
        if not wanted:
            raise UnknownSplit(
                f"{path} has the split {TEST_SPLIT} only, which is for evaluation: ask for it by name",
                known=[TEST_SPLIT],
            )
    for file in wanted:
        yield from _file_rows(file, named[file])


def _hub_rows(name: str, split: str | None) -> Iterator[_Row]:
    try:
        import datasets
    except ImportError as error:
        raise NotSupported(
            f"{name}: a data set of the hub needs the package datasets: {install_hint('swe', _came_from())}; or name a "
            "local .jsonl or .parquet file"
        ) from error
    try:
        known = datasets.get_dataset_split_names(name)
        wanted = [part for part in known if (part == split if split else part != TEST_SPLIT)]
        loaded = {part: datasets.load_dataset(name, split=part) for part in wanted}
    except Exception as error:  # the package has no common class for what goes wrong on the way to the hub
        raise NotSupported(
            f"{name}: not loaded from the Hugging Face hub ({type(error).__name__}: {_one_line(error)}). Without a "
            f"network, fetch it elsewhere (hf download --repo-type dataset {name} --local-dir DIR) and name "
            "that directory"
        ) from error
    if not wanted:
        hint = "" if split else ", which is for evaluation: ask for it by name"
        raise UnknownSplit(
            f"{name} has no split {split or 'to train on'!r}: it has {', '.join(known)}{hint}", known=known
        )
    for part, rows in loaded.items():
        for number, row in enumerate(rows, 1):
            yield f"{part} row {number}", row, part


def _tests(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str) and value.strip():
        text = value
        try:
            value = decode(text)
        except ValueError:
            try:
                if _PYTHON_LIST.fullmatch(text) is None:
                    raise ValueError("no list of texts") from None
                value = ast.literal_eval(text.strip())
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise DatasetInvalid(f"{where} is text that is no list in JSON: {text[:60]!r}") from None
    if value is None or value == "":
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(test, str) for test in value):
        raise DatasetInvalid(f"{where} has to be a list of test ids, or one as JSON")
    return tuple(value)


def _moment(value: str | date | None, name: str) -> datetime | None:
    """Return a time in UTC. A number is one too: seconds, or milliseconds, since 1970."""
    if value is None:
        return None
    if isinstance(value, str):
        text = value.strip()
        try:
            if re.fullmatch(r"\d{9,13}(\.\d+)?", text):
                seconds = float(text)
                return datetime.fromtimestamp(seconds / 1000 if seconds > 1e11 else seconds, UTC)
            value = datetime.fromisoformat(text)
        except (ValueError, OverflowError):
            raise InvalidRequest(
                f"{name} is {text[:60]!r}: it has to be a time in ISO 8601, 2023-02-22 for example"
            ) from None
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    try:
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError:
        raise InvalidRequest(f"{name} is {value.isoformat()}, which is outside of the years 1 to 9999 in UTC") from None


def some(names: Sequence[str]) -> str:
    """Return the first three names, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
