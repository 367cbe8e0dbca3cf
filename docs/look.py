"""A look at every page of the built site in a browser: wide and narrow, light and dark, with its search.

    mkdocs build --strict --site-dir /tmp/site
    pip install playwright && playwright install chromium   # or --browser /usr/bin/chromium, if installed
    python docs/look.py /tmp/site --out /tmp/look

Fails if a page is wider than the screen, if on a wide one a table, code or formula goes on to the right, if a
figure or the font of formulas is missing, if links are too pale, or if the search does not find first what
people look for. Leaves a screenshot of each page in --out, to be looked at.
"""

import argparse
import sys
from pathlib import Path

WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")
# The page that the search has to find first
SEARCHES = {
    "GAE": "theory",
    "lambda": "theory",
    "symbol": "symbols",
    "frame stack": "stacked_frames",
    "action mask": "recipes_ppo",
    "atari": "recipes_ppo",
    "custom environment": "environments",
    "own environment": "environments",
    "resume": "reading",
    "preemption": "scaling",
    "multi gpu": "scaling",
    "wandb": "tracking",
    "sweep": "tracking",
    "burn-in": "r2d2_lstm",
    "license": "index",
    "cite": "index",
}
# What reaches beyond the right side of the screen, of what does not scroll in a box of its own
WIDE = """width => {
    const scrolls = box => box && (getComputedStyle(box).overflowX != "visible" || scrolls(box.parentElement))
    const isWide = element => element.getBoundingClientRect().right > width + 1
    return [...document.querySelectorAll("article *")]
        .filter(element => isWide(element) && !scrolls(element.parentElement.closest("article *")))
        .slice(0, 5).map(element => element.outerHTML.slice(0, 120))
}"""
HIDDEN = """() => [...document.querySelectorAll(".md-typeset__scrollwrap, pre > code, .formula")]
    .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.innerText.slice(0, 60))"""
# Links whose contrast (WCAG 2, relative luminance) with what is behind them is below 4.5
PALE = """() => {
    const parse = color => color.match(/[\\d.]+/g).map(Number)
    const luminance = ([r, g, b]) => [r, g, b].map(x => x / 255)
        .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
        .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0)
    const behind = element => {
        const color = parse(getComputedStyle(element).backgroundColor)
        const isSeen = color.length < 4 || color[3] == 1
        return isSeen || !element.parentElement ? color : behind(element.parentElement)
    }
    const contrast = element => {
        const [a, b] = [parse(getComputedStyle(element).color), behind(element)].map(luminance)
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
    }
    return [...document.querySelectorAll("article a:not(.headerlink):not(.md-button), article a code")]
        .filter(link => link.innerText && contrast(link) < 4.5)
        .slice(0, 3).map(link => contrast(link).toFixed(2) + " " + link.innerText)
}"""
HAS_FONT = "() => !document.querySelector('math') || document.fonts.check('16px \"STIX Two Math\"')"
BROKEN = "() => [...document.images].filter(image => !image.naturalWidth).map(image => image.src)"


def look_at(page, path: Path, width: int, scheme: str, out: Path) -> list[str]:
    """What is wrong with one page; its screenshot goes to `out`."""
    page.goto(path.as_uri())
    page.wait_for_load_state("load")
    page.wait_for_timeout(200)  # the theme's script puts wide tables into boxes
    problems = [f"broken image {source}" for source in page.evaluate(BROKEN)]
    page.evaluate("() => document.querySelectorAll('details').forEach(box => box.open = true)")
    needed = page.evaluate("() => document.documentElement.scrollWidth")
    if needed > width:
        problems.append(f"needs {needed} pixels: {page.evaluate(WIDE, width)}")
    problems += [f"a link of contrast {text!r}" for text in page.evaluate(PALE)]
    if not page.evaluate(HAS_FONT):
        problems.append("formulas without their font")
    if width == WIDTHS[0]:
        problems += [
            f"a table, code or formula out of sight at the right: {text!r}" for text in page.evaluate(HIDDEN)
        ]
    page.evaluate("() => document.querySelectorAll('details').forEach((box, i) => box.open = i == 0)")
    shown = page.evaluate("() => document.body.dataset.mdColorScheme")
    if shown != {"light": "default", "dark": "slate"}[scheme]:
        problems.append(f"{shown} on a {scheme} system")
    page.screenshot(path=out / f"{path.stem}_{width}_{scheme}.png", full_page=True)
    return [f"{path.name}, {width} pixels, {scheme}: {problem}" for problem in problems]


def search(page, path: Path, words: str, wanted: str) -> list[str]:
    """What is wrong with the search for `words`, which has to find the page `wanted` first."""
    page.goto(path.as_uri())
    opener = page.locator("label.md-header__button[for=__search]")
    try:
        if opener.is_visible():  # on narrow screens
            opener.click()
        page.locator("input.md-search__input").click()
        page.keyboard.type(words, delay=50)
        first = page.locator(".md-search-result__item").first
        first.wait_for(state="attached", timeout=10_000)
        page.wait_for_timeout(300)  # the results of the last letter
        found = Path(first.locator("a").first.get_attribute("href").partition("?")[0].partition("#")[0]).stem
    except Exception:
        return [f"the search for {words} finds nothing"]
    return [] if found == wanted else [f"the search for {words} first finds {found}"]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path, help="folder of the built site")
    parser.add_argument("--out", type=Path, default=Path("look"), help="folder for the screenshots")
    parser.add_argument("--browser", help="path of a chromium, instead of playwright's own")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    from playwright.sync_api import sync_playwright

    args.out.mkdir(parents=True, exist_ok=True)
    pages = sorted(path.resolve() for path in args.site.glob("*.html") if path.stem != "404")
    problems = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        for width in WIDTHS:
            for scheme in SCHEMES:
                size = {"width": width, "height": 900}
                page = browser.new_context(
                    viewport=size, color_scheme=scheme, is_mobile=width < 600
                ).new_page()
                page.on("pageerror", lambda error, found=problems: found.append(f"script error: {error}"))
                for path in pages:
                    problems += look_at(page, path, width, scheme, args.out)
                for words, wanted in SEARCHES.items():
                    found = search(page, pages[0], words, wanted)
                    problems += [f"{width} pixels, {scheme}: {problem}" for problem in found]
                page.close()
        browser.close()
    print("\n".join(problems) or f"{len(pages)} pages as they should be; screenshots in {args.out}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
