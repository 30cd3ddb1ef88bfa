"""A corpus for tests that is made at once."""


class Counting:
    """Text that a byte model learns within a few steps: numbers counted upwards."""

    name = "counting"

    def description(self):
        return {"source": self.name}

    def documents(self, split):
        first = 0 if split == "train" else 10_000
        for i in range(first, first + (400 if split == "train" else 80)):
            yield ", ".join(str(n) for n in range(i, i + 20))
