"""Completion of commands and their options in bash, made from the commands themselves.

    image-diffusion completion > ~/.local/share/bash-completion/completions/image-diffusion

zsh takes the same after `autoload bashcompinit; bashcompinit`. Where no option is meant, files are completed.
"""

from __future__ import annotations

from importlib import import_module

from image_diffusion.core import command


def script() -> str:
    """What bash reads: the commands, and the options of each as its own parser has them."""
    options = {}
    for name in command.COMMANDS:
        main = import_module(f"image_diffusion.{name}").main
        options[name] = " ".join(sorted(command.options_of(main)))
    cases = "\n".join(f'        {name}) words="{words}" ;;' for name, words in options.items())
    return f"""\
_image_diffusion() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words=""
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    if [[ $COMP_CWORD -eq 1 ]]; then words="{" ".join(options)}"; elif [[ $current != -* ]]; then words=""; fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _image_diffusion image-diffusion
"""


def main() -> None:
    command.Parser(prog="image-diffusion completion", description=__doc__).parse_args()
    print(script(), end="")


if __name__ == "__main__":
    command.run(main)
