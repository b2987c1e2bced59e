"""What the commands of a conversation are, as `/?`, `/set` and `/show` print them."""

HELP = '''\
Available commands:
  /set            Set parameters, the system message and session values
  /show           Show information about the model
  /load MODEL     Go on with another model; the conversation begins anew
  /save NAME      Keep model, system message and parameters as a model of that name
  /file PATH      Put a text file before the next message
  /list           Models that are on this machine
  /clear          Forget the conversation
  /bye            Leave
  /?, /help       This help

Use """ to begin and to end a message of several lines.
Tab completes commands. Ctrl-C stops an answer. Ctrl-D leaves.'''

SET_HELP = """\
Available commands:
  /set parameter <name> <value>   temperature, top_p, top_k, min_p, typical_p, seed, stop, max_tokens, min_tokens,
                                  repetition_penalty, repeat_last_n, presence_penalty, frequency_penalty
  /set system <text>              Set the system message
  /set format json | <file>       Answer in JSON, or by the file's JSON schema
  /set noformat                   Answer in any form
  /set think [low|medium|high]    Think before answering
  /set nothink                    Answer without thinking
  /set markdown | nomarkdown      Render answers as Markdown, or show them as they are
  /set wordwrap | nowordwrap      Break lines at words, or leave that to the terminal
  /set verbose | quiet            Print statistics after each answer, or not
  /set history | nohistory        Write lines to the history file, or not"""

SHOW_HELP = """\
Available commands:
  /show info          What is known of the model
  /show parameters    Sampling parameters
  /show system        The system message
  /show template      The chat template
  /show license       The license
  /show modelfile     Model, system message and parameters as a Modelfile"""

SETTINGS = (
    "parameter",
    "system",
    "format",
    "noformat",
    "think",
    "nothink",
    "markdown",
    "nomarkdown",
    "wordwrap",
    "nowordwrap",
    "verbose",
    "quiet",
    "history",
    "nohistory",
)
SUBJECTS = ("info", "parameters", "system", "template", "license", "modelfile")
COMMANDS = ("/set", "/show", "/load", "/save", "/file", "/list", "/clear", "/bye", "/exit", "/?", "/help")
