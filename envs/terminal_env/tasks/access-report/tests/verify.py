from errata_verify import check, lines, require, sha256, text

TOP = ['22 10.2.1.217', '14 10.3.5.38', '9 10.1.4.27', '8 10.2.0.233', '6 10.0.1.6']
BYTES = 2389597
HOURS = ['03,25', '04,22', '05,25', '06,32', '07,24', '08,31', '09,24', '10,32', '11,27', '12,22', '13,24', '14,34', '15,22', '16,14', '17,35', '18,27']

LOG = "25bbf01dd305dedf08f24f26d2cc45bf5e95ab41c52596696fc81715ec011a2b"


@require
def the_log_is_as_it_was():
    assert sha256("access.log") == LOG


@check()
def the_addresses_with_most_errors():
    assert [line.strip() for line in lines("top_errors.txt")] == TOP


@check()
def the_bytes_of_the_interface():
    assert int(text("bytes.txt").strip()) == BYTES


@check()
def the_requests_by_hour():
    rows = [line.strip() for line in lines("hours.csv")]
    assert rows[0] == "hour,requests"
    assert rows[1:] == HOURS
