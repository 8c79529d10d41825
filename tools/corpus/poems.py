"""Four-line rhymes."""

from __future__ import annotations

import random

CREATURES = ["bird", "bee", "fox", "mouse", "frog", "cat", "hummingbird", "owl", "duck"]
ADJECTIVES = ["little", "tiny", "happy", "quiet", "golden", "clever"]
# rhyme word pair: first couplet (two lines), second couplet (two lines)
COUPLETS = {
    "sky": ("looks at the sky,", "and wonders how the small birds fly.",
            "The clouds are white up in the sky,", "and all the hours seem to fly."),
    "tree": ("sits in a tree,", "and listens to a busy bee.",
             "A red leaf falls down from the tree,", "as golden as a honey bee."),
    "night": ("wakes in the night,", "and sees a small and silver light.",
              "How soft and quiet is the night,", "the stars have plenty of light."),
    "moon": ("sings to the moon,", "and hopes that spring is coming soon.",
             "The pond is shining like a moon,", "good night, the day is coming soon."),
    "day": ("wakes up with the day,", "and calls its friends to come and play.",
            "The flowers open with the day,", "and every child comes out to play."),
    "sea": ("looks over the sea,", "and feels the wind, so wild and free.",
            "The river runs down to the sea,", "and every little fish is free."),
    "hill": ("climbs up the hill,", "where all the world is soft and still.",
             "The wind is sleeping on the hill,", "and even busy feet are still."),
    "star": ("looks up to a star,", "and dreams of places very far.",
             "The evening lights a single star,", "and home is never very far."),
    "snow": ("walks in the snow,", "and sees the yellow windows glow.",
             "The garden sleeps beneath the snow,", "and all the little windows glow."),
    "spring": ("is waiting for spring,", "so that the little birds can sing.",
               "The brook is full of songs of spring,", "and everyone begins to sing."),
    "nest": ("comes back to its nest,", "and folds its wings to take a rest.",
             "The moon is looking in the nest,", "and says that it is time to rest."),
    "rain": ("is out in the rain,", "and dances down the garden lane.",
             "The roof is singing in the rain,", "and puddles shine along the lane."),
}  # fmt: skip


def poem(rng: random.Random) -> tuple[str, str]:
    """The creature and the four lines."""
    first, second = rng.sample(list(COUPLETS), 2)
    creature = rng.choice(CREATURES)
    opening = f"A {rng.choice(ADJECTIVES)} {creature} {COUPLETS[first][0]}"
    return creature, "\n".join((opening, COUPLETS[first][1], *COUPLETS[second][2:]))
