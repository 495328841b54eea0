from train.seeds import derive_seed


def test_a_seed_is_the_documented_hash():
    # printf '0/sample/96' | b2sum -l 32  ->  b3ca8ce1, read little endian, less the top bit.
    assert derive_seed(0, "sample", 96) == 0xE18CCAB3 & 0x7FFFFFFF


def test_seeds_differ_by_run_purpose_and_number():
    seeds = {derive_seed(run, purpose, n) for run in range(5) for purpose in ("a", "b") for n in range(200)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_digits_of_two_numbers_do_not_run_together():
    assert derive_seed(0, "reward", 1, 12) != derive_seed(0, "reward", 11, 2)
