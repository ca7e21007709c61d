"""The text on which `quire quality` compares models where it is given none."""

SAMPLE_TEXT = """\
The lighthouse at the end of the pier had been dark for eleven years when the council \
decided to sell it. Three people came to look at it on the first day. The first was an \
engineer from the city, who measured the walls, counted the stairs (there were one hundred \
and twelve), and left without a word. The second was a painter who wanted the light but not \
the stairs. The third was a retired ferry captain named Ines, who asked a single question: \
"Does the lamp still turn?"

It did not. The clerk explained that the motor had been removed, that the lens was cracked \
in two places, and that ships no longer needed it anyway, because every boat in the harbour \
carried a small receiver that knew its position to within a few metres. Ines listened \
politely. Then she paid the deposit in cash, asked for the keys, and spent the afternoon \
sweeping dead flies from the gallery.

How does a bicycle stay upright? Many people answer that the spinning wheels act as \
gyroscopes. That is only part of the story. Experiments with bicycles whose gyroscopic \
effect had been cancelled showed that they still balance by themselves above a certain \
speed. What matters more is that the front wheel turns into the fall: when the frame leans \
to the left, the handlebars steer to the left, and the wheels move back under the centre of \
mass. A rider does the same thing without thinking about it. At low speed the corrections \
must be larger, which is why riding slowly in a straight line is difficult.

To make a simple vegetable soup for four people you need two onions, three carrots, one \
stick of celery, 400 grams of potatoes, a litre of water and a little oil. Chop the onions \
and cook them gently for ten minutes; they should become soft but not brown. Add the other \
vegetables, cut into cubes of about one centimetre, and stir for two minutes. Pour in the \
water, add half a teaspoon of salt, and simmer for twenty-five minutes. Taste it, add \
pepper, and serve it with bread.

def moving_average(values, size):
    \"\"\"Means of each run of `size` neighbouring values.\"\"\"
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    total = sum(values[:size])
    result = [total / size]
    for index in range(size, len(values)):
        total += values[index] - values[index - size]
        result.append(total / size)
    return result

User: My train leaves at 14:35 and the journey takes two hours and fifty minutes. When do I \
arrive?
Assistant: You arrive at 17:25. Two hours after 14:35 is 16:35, and fifty minutes later it \
is 17:25.
User: And if it is a quarter of an hour late?
Assistant: Then you arrive at 17:40.

The word "planet" comes from a Greek word for wanderer. Against the background of the stars, \
which keep their places with respect to each other, five bright points move from night to \
night: Mercury, Venus, Mars, Jupiter and Saturn. Uranus was found with a telescope in 1781. \
Neptune was found in 1846, after calculations had shown where to look: the orbit of Uranus \
did not agree with the predictions, and the difference could be explained by the pull of \
another body further out. It was a triumph of arithmetic. The same method was later applied \
to Mercury, whose orbit also showed a small disagreement; but this time there was no hidden \
planet, and the explanation had to wait for a new theory of gravity.

Name, population, area
Norway, 5.5 million, 385,000 square kilometres
Portugal, 10.4 million, 92,000 square kilometres
Uruguay, 3.4 million, 176,000 square kilometres
New Zealand, 5.2 million, 268,000 square kilometres

Dear Ms Okafor, thank you for your letter of 3 March. We have looked into the matter of the \
invoice and found that you are right: the second delivery was charged twice. We have \
corrected the account, and the amount of 184.50 euros will be returned to you within five \
working days. Please accept our apologies for the inconvenience. If you have any further \
questions, do not hesitate to call us. Yours sincerely.

A proof that there are infinitely many prime numbers: suppose that there were only finitely \
many, and multiply all of them together. Add one to the product. The result leaves a \
remainder of one when it is divided by any of the primes in the list, so none of them \
divides it. But every number greater than one has a prime divisor; therefore there is a \
prime that is not in the list, which contradicts what was supposed. Hence the list of primes \
never ends.

When Ines had finished cleaning the lens she climbed down to the harbour and bought a motor \
from a washing machine. It took her until October to make it turn slowly enough. On the \
first night of storms the old light swept over the water again, once every nine seconds, and \
along the coast people came to their windows to look. No ship needed it. The fishermen said \
that it was a waste of electricity, and began, without mentioning it to each other, to set \
their watches by it.
"""
