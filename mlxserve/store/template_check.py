"""Chat templates that a user gives a model: checked before they are kept."""

import re

from mlxserve.errors import InvalidParameter

# {{ .Prompt }}, {{- range .Messages }}, {{ if .System }}: no Jinja expression begins like these.
_GO_TEMPLATE = re.compile(r"\{\{-?\s*(\.|\$|(if|range|else|end|with|template|block|define)\b(?!\s*[(.\[|]))")


def check_template(template: str) -> None:
    """Refuse what is no Jinja template.

    Raises:
        InvalidParameter: it is a Go template, or has a syntax error; `param` is "template".
    """
    from jinja2 import Environment, TemplateError

    if _GO_TEMPLATE.search(template):
        raise InvalidParameter(
            "this is a Go template, as Ollama has them; models here use Jinja templates, as on the Hugging Face hub: "
            "leave it out to keep the model's own",
            param="template",
        )
    try:
        # As transformers does it; syntax of blocks that it adds must not be refused here.
        Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]).parse(
            template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        )
    except TemplateError as error:
        raise InvalidParameter(f"the template is no valid Jinja: {error}", param="template") from error
