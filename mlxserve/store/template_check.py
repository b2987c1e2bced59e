"""Chat templates that a user gives a model: checked before they are kept."""

import re

from mlxserve.errors import InvalidParameter

# {{ .Prompt }}, {{- range .Messages }}, {{ if .System }}: no Jinja expression begins like these.
_GO_TEMPLATE = re.compile(r"\{\{-?\s*(\.|\$|(if|range|else|end|with|template|block|define)\b(?!\s*[(.\[|]))")


def check_template(template: str) -> None:
    """Refuse what is no Jinja template of chats.

    Raises:
        InvalidParameter: it is a Go template, has a syntax error, or does not read the messages; `param` is "template".
    """
    from jinja2 import Environment, TemplateError, meta

    if _GO_TEMPLATE.search(template):
        raise InvalidParameter(
            "this is a Go template, as Ollama has them; models here use Jinja templates, as on the Hugging Face hub: "
            "leave it out to keep the model's own",
            param="template",
        )
    try:
        # As transformers does it; syntax of blocks that it adds must not be refused here.
        parsed = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]).parse(
            template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        )
    except TemplateError as error:
        raise InvalidParameter(f"the template is no valid Jinja: {error}", param="template") from error
    if "messages" not in meta.find_undeclared_variables(parsed):
        raise InvalidParameter(
            "the template does not read `messages`, so that the model would see nothing of a chat; one begins for "
            "example with {% for message in messages %}",
            param="template",
        )
