"""The sentences: frames for training and frames held out, none in both. A frame is a sentence with gaps."""

from adapters.recipe.values import Split


def lines(train: str, heldout: str) -> Split:
    """Split of frames, one a line."""
    return Split(*(tuple(map(str.strip, text.strip().splitlines())) for text in (train, heldout)))


def phrases(train: str, heldout: str) -> Split:
    """Split of phrases with a slash between them."""
    return Split(*(tuple(" ".join(text.split()).split(" / ")) for text in (train, heldout)))


# One order: {name} bought {count} {item} for {price} (dollars and cents) each.
ORDERS = lines(
    """
    {name} ordered {count} {item} at ${price} each.
    {name} bought {count} {item} for ${price} apiece.
    An order of {count} {item} at ${price} each came in from {name}.
    We sold {count} {item} to {name} at a unit price of {price} dollars.
    {count} {item} at {price} dollars each were sold to {name}.
    At ${price} apiece, {name} took {count} {item}.
    {name} would like {count} {item}, each costing ${price}.
    Please send {name} {count} {item}; the price is ${price} per piece.
    The price of ${price} each did not stop {name} from getting {count} {item}.
    Customer {name}: {count} {item}, {price} dollars per unit.
    Invoice for {name}, {count} {item} at ${price} per unit.
    Yesterday {name} paid ${price} each for {count} {item}.
    {item} cost ${price} each, and {name} wants {count} of them.
    With a price of {price} dollars apiece, {count} {item} went to {name}.
    I spoke with {name}, who needs {count} {item} at ${price} each.
    For {count} {item} we charged {name} ${price} per item.
    {name} has reserved {count} {item}. Each one is {price} dollars.
    There is a new purchase by {name}: {count} {item}, ${price} each.
    Our client {name} asked for {count} {item} priced at ${price} each.
    The shop charged {price} dollars for each of the {count} {item} that {name} picked.
    Ship {count} {item} to {name} and bill ${price} for each.
    Each at {price} dollars, {count} {item} are on their way to {name}.
    Is it true that {name} purchased {count} {item} for ${price} each?
    A parcel with {count} {item} for {name} left today, ${price} a piece.
    {name} called about {item}: {count} of them, ${price} each.
    Put {count} {item} at ${price} each on the account of {name}.
    """,
    """
    This morning {count} {item} were delivered to {name}, who owes us ${price} for every one.
    Good news, {name} just confirmed the deal: {count} {item}, {price} dollars for each piece!
    Note for the warehouse: pack {count} {item} for {name}, unit cost ${price}.
    After some bargaining {name} got {count} {item} down to ${price} each.
    {name} emailed to request {count} {item} at the usual {price} dollars each.
    The cart of {name} contains {count} {item} with a single price of ${price}.
    Since they are only ${price} each, {name} decided on {count} {item}.
    Could you set aside {count} {item} for {name} at {price} dollars apiece?
    """,
)

# A list of things. {items} is "a lamp, three chairs and two bottles of ink".
LISTS = lines(
    """
    We need {items}.
    Please buy {items}.
    I packed {items}.
    The box contains {items}.
    She brought {items} to the party.
    For the trip they took {items}.
    There are {items} on the table.
    Don't forget {items}!
    He asked me to get {items} from the shop.
    On the list are {items}.
    Could you bring {items} tomorrow?
    In the garage I found {items}.
    My order was {items}.
    The school collected {items} for the sale.
    To finish the room we still want {items}.
    They gave us {items} as a present.
    With {items} the kit is complete.
    {items} were left in the car.
    {items} are what the club asked for.
    Inside the old trunk lay {items}.
    My aunt sent {items} last week.
    The kitchen is missing {items}.
    Let us order {items} before Friday.
    You will find {items} in the drawer.
    The thief got away with {items}.
    Our neighbour lent us {items}.
    """,
    """
    When the lights came back on, {items} had vanished from the stage.
    Mum wants you to pick up {items} on the way home.
    The museum shop ran out of {items} within an hour.
    Everything he owned was {items}.
    Before you leave, check that {items} fit into the van.
    The winner of the raffle goes home with {items}.
    According to the label, this crate holds {items}.
    Would {items} be enough for the weekend?
    """,
)

# A period from {start} to {end}.
PERIODS = lines(
    """
    The {event} runs from {start} to {end}.
    The {event} starts on {start} and ends on {end}.
    From {start} until {end} we host the {event}.
    Our {event} will take place between {start} and {end}.
    The {event} opens {start} and closes {end}.
    Between {start} and {end} the {event} is on.
    We planned the {event} for {start} to {end}.
    Join the {event} from {start} through {end}.
    The {event} began on {start}; it finished on {end}.
    Starting {start}, the {event} goes on until {end}.
    The first day of the {event} is {start} and the last is {end}.
    They kept the {event} going from {start} up to {end}.
    {start} to {end}: {event}.
    The dates of the {event} are {start} to {end}.
    I was at the {event} from {start} to {end}.
    Please block {start} to {end} for the {event}.
    The {event} lasts until {end}, starting on {start}.
    The {event} ends on {end}. It begins on {start}.
    Until {end} you can visit the {event}, which opens on {start}.
    By {end} the {event} will be over; it started on {start}.
    The {event} closed on {end} after opening on {start}.
    Everyone enjoyed the {event}, from its start on {start} to its end on {end}.
    """,
    """
    Tickets for the {event} are valid from {start} and expire on {end}.
    She will be away at the {event}, leaving on {start} and coming back on {end}.
    Nobody expected the {event}, which kicked off on {start}, to go on till {end}.
    Booked: {event}, arrival {start}, departure {end}.
    What happened during the {event}, {start} through {end}?
    The town agreed to extend the {event} until {end}; it had begun on {start}.
    Mark your calendar, the {event} goes from {start} all the way to {end}!
    Before it shuts on {end}, see the {event} that opened its doors on {start}.
    """,
)

# Questions about a table: what is asked, then conditions by table, column and operator.
QUESTIONS = {
    "list": lines(
        """
        List the {things} {conditions}.
        Show me all {things} {conditions}.
        Which {things} are {conditions}?
        Give me the names of {things} {conditions}.
        Find every one of the {things} {conditions}.
        What are the names of the {things} {conditions}?
        I need a list of {things} {conditions}.
        Name all {things} {conditions}.
        """,
        """
        Please print the {things} {conditions}.
        Can you tell me which {things} we have {conditions}?
        """,
    ),
    "count": lines(
        """
        How many {things} are {conditions}?
        Count the {things} {conditions}.
        What is the number of {things} {conditions}?
        Tell me how many {things} we have {conditions}.
        Give me the count of {things} {conditions}.
        How many {things} do we have {conditions}?
        I want to know the number of {things} {conditions}.
        """,
        """
        Find out how many {things} there are {conditions}.
        What is the total count of {things} {conditions}?
        """,
    ),
    "average": lines(
        """
        What is the average {column} of {things} {conditions}?
        Compute the mean {column} of the {things} {conditions}.
        Give me the average {column} for {things} {conditions}.
        Show the average {column} over all {things} {conditions}.
        Find the mean {column} for {things} {conditions}.
        On average, what is the {column} of {things} {conditions}?
        I need the average {column} of the {things} {conditions}.
        """,
        """
        Calculate the average {column} among {things} {conditions}.
        What mean {column} do {things} {conditions} have?
        """,
    ),
    "top": lines(
        """
        List the {n} {things} with the highest {column} {conditions}.
        Show the top {n} {things} by {column} {conditions}.
        Which {n} {things} {conditions} have the highest {column}?
        Give me the {n} {things} {conditions} with the largest {column}.
        Name the {n} {things} {conditions} that have the greatest {column}.
        Find the {n} {things} with the biggest {column} {conditions}.
        Top {n} {things} {conditions} by {column}.
        For which {n} {things} {conditions} is the {column} highest?
        Pick the {n} {things} {conditions} that come first by {column}.
        """,
        """
        What are the {n} {things} {conditions} whose {column} is highest?
        Get me the leading {n} {things} by {column} {conditions}.
        """,
    ),
}
CONDITIONS = {
    ("employees", "city", "="): phrases(
        """
        from {value} / in {value} / based in {value} / living in {value} / in the city of {value} / who
        live in {value}
        """,
        "working in {value} / located in {value}",
    ),
    ("employees", "age", ">"): phrases(
        """
        older than {value} / over {value} years old / above {value} years of age / with an age over
        {value} / aged over {value} / over the age of {value}
        """,
        "above the age of {value} / older than {value} years",
    ),
    ("employees", "age", "<"): phrases(
        """
        younger than {value} / under {value} years old / below {value} years of age / with an age under
        {value} / aged under {value} / under the age of {value}
        """,
        "below the age of {value} / younger than {value} years",
    ),
    ("employees", "salary", ">"): phrases(
        """
        earning more than {value} / with a salary above {value} / paid over {value} / who make more
        than {value} / with a salary of more than {value} / earning over {value}
        """,
        "paid more than {value} / with an income above {value}",
    ),
    ("employees", "salary", "<"): phrases(
        """
        earning less than {value} / with a salary below {value} / paid under {value} / who make less
        than {value} / with a salary of less than {value} / earning under {value}
        """,
        "paid less than {value} / with an income below {value}",
    ),
    ("products", "category", "="): phrases(
        """
        in the category {value} / from the {value} category / of category {value} / filed under {value}
        / in {value} / from {value}
        """,
        "in the {value} section / belonging to {value}",
    ),
    ("products", "price", ">"): phrases(
        """
        costing more than {value} / with a price above {value} / priced over {value} / more expensive
        than {value} / that cost over {value} / at a price of more than {value} / selling for more than {value}
        / selling for over {value} / that sell at more than {value} / with a price tag over {value}
        """,
        "priced above {value} / sold for more than {value}",
    ),
    ("products", "price", "<"): phrases(
        """
        costing less than {value} / with a price below {value} / priced under {value} / cheaper than
        {value} / that cost under {value} / at a price of less than {value} / selling for less than {value}
        / selling for under {value} / that sell at less than {value} / with a price tag under {value}
        """,
        "priced below {value} / sold for less than {value}",
    ),
    ("products", "stock", ">"): phrases(
        """
        with more than {value} in stock / with a stock above {value} / stocked more than {value} times
        / of which we have more than {value} / with over {value} pieces in stock / with a stock of more
        than {value}
        / with over {value} units available / of which more than {value} remain / with more than {value} left
        """,
        "with more than {value} units left / of which over {value} are in stock",
    ),
    ("products", "stock", "<"): phrases(
        """
        with less than {value} in stock / with a stock below {value} / stocked fewer than {value} times
        / of which we have fewer than {value} / with under {value} pieces in stock / with a stock of
        less than {value}
        / with under {value} units available / of which fewer than {value} remain / with less than {value} left
        """,
        "with fewer than {value} units left / of which under {value} are in stock",
    ),
}
