"""Finds stop strings in text that arrives in pieces."""

from collections import deque

from mlxserve.errors import InvalidParameter


class StopStringMatcher:
    """Gives text through up to the first stop string.

    Of all matches the one that starts first wins, and of those that start together the longest, however the text is
    cut into pieces. So a match is settled only when no match that would beat it can be completed any more: "\\n\\n" is
    still waited for after "\\n" if both are stop strings. At the end of the text flush() settles it.

    This is Aho and Corasick's automaton (1975): time linear in the text, whatever the number of stop strings.

    Raises:
        InvalidParameter: a stop string is empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise InvalidParameter("a stop string must not be empty", param="stop")
        self.matched: str | None = None
        """The stop string that ended the text, once it is settled."""
        self._trie = _Trie(stops)
        self._node = 0
        self._held = ""
        """The end of the text so far that is not given out: its last characters may belong to a stop string."""
        self._candidate: str | None = None
        self._candidate_start = 0
        """Where the candidate starts in the held text."""

    def push(self, text: str) -> str:
        """Take the next piece; return what is now certain to come before any stop string.

        After a match there is no more text.
        """
        if self.matched is not None:
            return ""
        end = len(self._held)
        self._held += text
        trie = self._trie
        for char in text:
            end += 1
            self._node = trie.step(self._node, char)
            stop = trie.longest_stop[self._node]
            if stop is not None:
                start = end - len(stop)
                if self._candidate is None or start <= self._candidate_start:
                    self._candidate, self._candidate_start = stop, start
            if self._candidate is not None and self._is_settled(end):
                return self._settle(self._candidate)
        return self._release(end - trie.depth[self._node])

    def flush(self) -> str:
        """Return the rest of the text: nothing follows. `matched` may be set by this."""
        if self._candidate is not None and self.matched is None:
            return self._settle(self._candidate)
        return self._release(len(self._held))

    def _is_settled(self, end: int) -> bool:
        """Whether no stop string that starts at or before the candidate can still be completed.

        The automaton's node is the longest end of the text that begins a stop string; if it cannot be extended it is a
        whole one, and then no later one is better.
        """
        pending_start = end - self._trie.depth[self._node]
        return pending_start > self._candidate_start or not self._trie.children[self._node]

    def _settle(self, stop: str) -> str:
        self.matched = stop
        text, self._held = self._held[: self._candidate_start], ""
        return text

    def _release(self, count: int) -> str:
        if self._candidate is not None:
            count = min(count, self._candidate_start)
        text, self._held = self._held[:count], self._held[count:]
        self._candidate_start -= count
        return text


class _Trie:
    """The stop strings' prefixes, numbered as nodes; node 0 is the empty one. Lists are indexed by node."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.longest_stop: list[str | None] = [None]
        """The longest stop string that the prefix ends with."""
        self._shorter = [0]
        """The longest proper end of the prefix that is itself a node (Aho and Corasick's failure link)."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, node: int, char: str) -> int:
        """The node of the longest prefix that ends the text, one character on."""
        while node and char not in self.children[node]:
            node = self._shorter[node]
        return self.children[node].get(char, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self.children[node]:
                self.children[node][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[node] + 1)
                self.longest_stop.append(None)
                self._shorter.append(0)
            node = self.children[node][char]
        self.longest_stop[node] = stop

    def _link(self) -> None:
        """Set failure links breadth first: a link leads to a smaller depth, where everything is set already."""
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.children[node].items():
                self._shorter[child] = self.step(self._shorter[node], char)
                self.longest_stop[child] = self.longest_stop[child] or self.longest_stop[self._shorter[child]]
                queue.append(child)
