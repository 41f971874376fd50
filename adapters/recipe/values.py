"""What goes into the gaps of the sentences: values for training and values held out, none in both."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """The same kind of thing, once for training and once held out."""

    train: tuple
    heldout: tuple

    def of(self, split: str) -> tuple:
        """The things of split "train" or "heldout"."""
        return getattr(self, split)


def words(train: str, heldout: str) -> Split:
    """Split of comma-separated words."""
    return Split(*(tuple(" ".join(text.split()).split(", ")) for text in (train, heldout)))


def numbers(low: int, high: int, step: int = 1) -> Split:
    """Split of the numbers low, low + step, .. below high: every fourth is held out."""
    everything = tuple(range(low, high, step))
    held_out = everything[2::4]
    return Split(tuple(number for number in everything if number not in held_out), held_out)


def pick(rng: random.Random, pool: Split, split: str) -> str:
    """A word of a pool. For training every third is invented: copying is to be learnt, not the pool."""
    word = rng.choice(pool.of(split))
    if split == "heldout" or rng.random() > 0.35:
        return word
    invented = "".join(
        rng.choice(ONSETS) + rng.choice("aeiou") + rng.choice(CODAS) for _ in range(rng.randint(2, 3))
    )
    return invented.capitalize() if word[0].isupper() else invented


# Syllables of invented words. No coda would need another plural than -s.
ONSETS = (
    "b",
    "br",
    "c",
    "d",
    "f",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
)
CODAS = ("", "", "n", "r", "l", "m", "nd", "rk")
FIRST_NAMES = words(
    """
    Anna, Boris, Carla, David, Elena, Felix, Greta, Hugo, Irene, Jonas, Karin, Leo, Maria, Nils, Olga,
    Peter, Rosa, Simon, Tina, Victor, Wendy, Yusuf, Amir, Bella, Chen, Diego, Emma, Farah, George,
    Hanna, Ivan, Julia, Kofi, Laura, Marco, Nadia, Omar, Paula, Ravi, Sofia, Thomas, Ursula, Walter,
    Zoe, Alice, Bruno, Chloe, Dmitri
    """,
    """
    Oscar, Helena, Samuel, Priya, Lucas, Ingrid, Mateo, Yara, Frank, Denise, Akira, Teresa, Gavin, Leila
    """,
)
LAST_NAMES = words(
    """
    Lopez, Schmidt, Rossi, Novak, Jensen, Dubois, Kim, Patel, Silva, Meyer, Olsen, Costa, Weber, Tanaka,
    Ivanov, Hughes, Moreau, Garcia, Becker, Nowak, Larsen, Okafor, Khan, Fischer, Santos, Murphy,
    Bianchi, Haddad, Sato, Keller, Wright, Petrov, Cohen, Martin, Andersen, Singh, Romero, Clark,
    Vargas, Nguyen
    """,
    """
    Walker, Moretti, Suzuki, Lindberg, Ramos, Hoffman, Osei, Bennett, Kowalski, Sharma, Dupont, Marsh
    """,
)
# Nouns that take a plain -s.
NOUNS = words(
    """
    lamp, chair, carpet, mirror, candle, blanket, pillow, bottle, basket, hammer, ladder, bucket, pencil,
    notebook, envelope, stapler, keyboard, monitor, speaker, camera, tripod, backpack, helmet, jacket,
    sweater, sock, belt, umbrella, wallet, necklace, apple, banana, lemon, onion, carrot, cucumber, egg,
    orange, melon, pumpkin, teapot, kettle, spoon, fork, plate, bowl, napkin, towel, sponge, broom, drawer,
    bracket, cushion, clock, radio, printer, cable, charger, battery pack, flashlight, rope, tent, sleeping
    bag, water filter, garden hose, flower pot, paint roller, nail gun, office desk, wool hat, silk tie,
    wooden spoon, glass jar, paper plate, metal bin, rubber boot, cotton shirt, leather belt, plastic crate,
    steel pan, coffee mug, picture frame, door handle, desk     fan, bath mat, bike pump, tennis racket, golf
    ball, chessboard, yoga mat, bread roll, bag of rice, tin of beans, bar of soap, jar of honey, roll of
    tape, pack of screws, map, whistle, sundial, drum, guitar, violin, trumpet, anchor, badge, barrel, bell,
    binder, blender, bolt, bookcase, boiler, bulb, button, cabinet, calendar, cap, card, cart, chain,
    chisel, cigar, coat, coin, collar, cooker, cork, crayon, crown, cup, curler, dart, deck, dial, dish rack,
    doll, drill, dryer, duvet, fan, feather, filter, flag, flute, folder, fridge, funnel, gate, gem, glove,
    goblet, grill, hairpin, handbag, hanger, heater, hook, horn, iron, jug, key, ladle, laptop, leaflet, lens
    cap, lid, lock, locker, log, mallet, mask, mattress cover, microphone, mitten, mop, motor, mug, nail,
    needle, net, nut, oar, oven, paddle, padlock, pan, pedal, pen, piano, pin, pipe, pitcher, planter, plug,
    poster, pot, pump, purse, puzzle, quilt, rake, razor, ribbon, ring, robot, roller, ruler, saddle, sandal,
    saw, scale, scooter, screen, seat, shawl, sheet, shirt, shovel, sign, sink, skirt, sled, slipper, sofa,
    spade, stamp, sticker, stove, strap, string, sweatband, swing, sword, table, tap, tile, timer, tire, tool
    box, top hat, toy car, trunk, tube, turtleneck, tuxedo, vacuum cleaner, vest, wagon, watermelon, wheel,
    wig, window frame, wok, wristband, avocado, apricot, bagel, biscuit, burger, cake, cookie,
    donut, fig, grape, hazelnut, kiwi, lentil soup, lime, muffin, olive, pancake, parsnip, pear, pie, pizza,
    plum, pretzel, sausage, turnip, waffle, walnut, yogurt cup
    """,
    """
    easel, kite, magnet, paint can, pepper, potato peeler, rug, screwdriver, skateboard, stool,
    suitcase, tablet, thermometer, toaster, tray, vase, spanner, zipper, curtain, doormat, eraser,
    garlic bulb, harmonica, ice pack, lantern, marker, oven glove, packet of seeds, can of soup, bottle
    of ink, stone tile, linen cloth, travel mug, phone case, hiking pole, globe
    """,
)
CITIES = words(
    """
    Berlin, Paris, Madrid, Rome, Vienna, Prague, Warsaw, Oslo, Dublin, Lisbon, Athens, Budapest, London,
    Munich, Milan, Lyon, Porto, Krakow, Geneva, Hamburg, Boston, Chicago, Denver, Seattle, Austin,
    Toronto, Tokyo, Seoul, Delhi, Cairo, Lima, Bogota, Sydney, Nairobi
    """,
    """
    Copenhagen, Barcelona, Helsinki, Zurich, Brussels, Naples, Montreal, Phoenix, Osaka, Lagos,
    Santiago, Perth
    """,
)
CATEGORIES = words(
    """
    toys, books, shoes, tools, furniture, electronics, clothing, jewelry, music, garden, kitchen,
    sports, games, camping, health, beauty, office, travel, art, fishing, cycling, software
    """,
    """
    food, luggage, lighting, bedding, crafts, movies, hardware, pets
    """,
)
EVENTS = words(
    """
    exhibition, festival, workshop, conference, summer camp, book fair, course, sale, tournament,
    retreat, trial, renovation, strike, training, exchange programme, internship, tour, cruise,
    vacation, season, audit, survey
    """,
    """
    residency, film week, inspection, pilot project, sabbatical, road closure, expedition, boot camp
    """,
)

COUNTS = numbers(2, 80)
UNIT_PRICES = numbers(103, 9999, 7)  # cents
YEARS = numbers(1960, 2060)
SQL_VALUES = {
    "city": CITIES,
    "category": CATEGORIES,
    "age": numbers(19, 70),
    "salary": numbers(18000, 120000, 500),
    "price": numbers(5, 900, 5),
    "stock": numbers(3, 500),
}
