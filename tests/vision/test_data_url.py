import base64
import urllib.parse

import pytest

from tests.vision.pictures import LIMITS, data_url, encode, photo
from triptych.errors import InvalidImage
from triptych.vision.images import encoded_bytes

PNG = encode(photo(5, 5))
TEXT = base64.b64encode(PNG).decode()


def failure(url: str) -> InvalidImage:
    with pytest.raises(InvalidImage) as caught:
        encoded_bytes(url, LIMITS)
    return caught.value


@pytest.mark.parametrize(
    "url",
    [
        data_url(PNG),
        f"  {data_url(PNG)}\n",
        data_url(PNG).replace("data:", "DATA:").replace(";base64", ";BASE64"),
        f"data:image/png;base64,{TEXT.rstrip('=')}",
        "data:image/png;base64," + "\r\n ".join(TEXT[i : i + 20] for i in range(0, len(TEXT), 20)),
        f"data:image/png;base64,{TEXT.replace('+', '-').replace('/', '_')}",
        f"data:image/png;base64,{urllib.parse.quote(TEXT, safe='')}",
        f"data:image/png;name=a.png;base64,{TEXT}",
        f"data:image/jpeg;base64,{TEXT}",
        f"data:text/plain;base64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:image/png,{urllib.parse.quote(PNG)}",
    ],
    ids=[
        "as it should be",
        "white space around",
        "upper case",
        "no padding",
        "white space inside",
        "URL-safe alphabet",
        "percent-encoded base64",
        "parameters",
        "another image type",
        "no image type",
        "no type",
        "percent-encoded bytes",
    ],
)
def test_a_data_url_with_one_reading_decodes(url: str) -> None:
    assert encoded_bytes(url, LIMITS) == PNG


@pytest.mark.parametrize(
    "url, defect",
    [
        (f"data:image/png;base64,{TEXT[:20]}*{TEXT[20:]}", "outside the alphabet"),
        (f"data:image/png;base64,{TEXT[:20]}={TEXT[20:]}", "padding before the end"),
        (f"data:image/png;base64,{TEXT[:21]}", "cut off"),
        ("data:image/png;base64,", "no data"),
        ("data:image/png;base64,  \n ", "no data"),
        (f"data:image/png,{TEXT}", "no ;base64 marker"),
        (f"data:image/png;base64{TEXT}", "no comma"),
        ("data:text/plain;base64,aGVsbG8=", "MIME type"),
    ],
)
def test_any_other_defect_is_named(url: str, defect: str) -> None:
    error = failure(url)
    assert error.reason == "DATA_URL_INVALID"
    assert defect in error.message
    assert TEXT[:16] not in error.message


@pytest.mark.parametrize("url", ["http://example.org/a.png", "file:///etc/passwd", "", "image/png;base64,AAAA"])
def test_other_schemes_are_unsupported(url: str) -> None:
    assert failure(url).reason == "IMAGE_URL_UNSUPPORTED"


def test_an_image_type_around_something_else_is_unsupported() -> None:
    assert failure("data:image/png;base64,aGVsbG8gd29ybGQ=").reason == "IMAGE_UNSUPPORTED"


def test_a_payload_over_the_limit_is_refused_before_it_is_decoded() -> None:
    error = failure("data:image/png;base64," + "A" * (30 << 20))
    assert error.reason == "IMAGE_TOO_LARGE"
    assert "max_image_bytes" in error.message
    assert failure("data:image/png;base64," + "A" * (200 << 20)).reason == "IMAGE_TOO_LARGE"
