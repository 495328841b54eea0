from train.ledger import LedgerEntry
from train.ledger_log import LEDGER, LedgerLog, read_entries


def write(folder, resumed_at, *entries):
    log = LedgerLog(folder, resumed_at)
    for version, tickets in entries:
        log.append(version, LedgerEntry(trained=tickets))
    log.close()


def trained(folder, version=99):
    return [(line["version"], line["trained"]) for line in read_entries(folder, version)]


def test_a_line_says_what_moved_and_nothing_moved_is_no_line(tmp_path):
    write(tmp_path, 0, (1, (0, 1)), (2, ()), (3, (2,)))
    assert trained(tmp_path) == [(1, [0, 1]), (3, [2])]
    assert trained(tmp_path, 2) == [(1, [0, 1])]


def test_lines_of_steps_that_are_made_again_are_removed(tmp_path):
    write(tmp_path, 0, (1, (0,)), (2, (1,)), (2, (5,)), (3, (2,)))
    with (tmp_path / LEDGER).open("a") as file:
        file.write('{"version":4,"tr')  # a kill cut it off
    write(tmp_path, 2, (3, (3,)))
    assert trained(tmp_path) == [(1, [0]), (2, [1]), (2, [5]), (3, [3])]


def test_a_run_that_begins_anew_begins_its_ledger_anew(tmp_path):
    write(tmp_path, 0, (1, (0,)))
    write(tmp_path, 0)
    assert trained(tmp_path) == []
