"""What the demo reads and asks: an invented handbook, three questions, a chat of four turns."""

from __future__ import annotations

INSTRUCTIONS = (
    "You are the assistant of the Marrow Point lighthouse. Answer questions with the handbook "
    "below, in one short sentence, and use only what it says."
)

HANDBOOK = """\
HANDBOOK OF THE MARROW POINT LIGHTHOUSE AND WEATHER STATION

1. The place
Marrow Point is a low island of black basalt, eleven miles off the northern coast. The lighthouse \
was built in 1874 by the engineer Adeline Voss, who lost a brother on the reef and refused to be \
paid for the work. The tower is thirty-eight metres high and has two hundred and twelve steps. Its \
walls are two metres thick at the foot, and the stone was brought from the mainland in barges that \
could land only on calm days, which is why the building took six years. A second, smaller house was \
added in 1921 for the weather station. The island has no trees, one freshwater spring, and a colony \
of about four thousand puffins that arrive in April and leave in August.

2. The crew
Four people live on the island at any time: the writer, the assistant writer, the meteorologist and \
the cook. The writer is Tomas Brandt, who has held the post for nineteen years. The assistant writer \
is Ines Okafor, the meteorologist is Dr. Priya Raman, and the cook is a retired fisherman named Olav \
Lund. Each of them serves for six weeks and then has three weeks of leave on the mainland. The writer \
decides in all matters of safety. In matters of food the cook decides, and nobody has ever won an \
argument against him. A new member of the crew spends the first week following the assistant writer \
on every round and does not stand a watch alone before the second week.

3. The lamp
The lamp is lit thirty minutes before sunset and put out thirty minutes after sunrise. It shows two \
white flashes every fifteen seconds and can be seen for twenty-four miles in clear air. The lens is \
the original one from 1874; it floats in a bath of mercury and weighs three tons, yet a child could \
turn it with one finger. The lens is cleaned every Monday with distilled water and a linen cloth, \
never with soap, because soap leaves a film that scatters the light. If the main bulb fails, a spare \
one swings into its place within eight seconds. If both fail, the watch lights the paraffin lamp that \
hangs in the lantern room and calls the harbour office at once. Every failure of the light, however \
short, is written into the red book with the time and the cause.

4. The fog signal
The fog signal is sounded whenever the old wreck on the western reef, two miles away, can no longer \
be seen from the gallery. It gives one blast of four seconds every minute. The compressor behind it \
needs ten minutes to build up pressure, so the watch starts it as soon as the horizon is lost and \
does not wait for the wreck to vanish. Ear protection hangs beside the door and is not optional. \
During the nesting season the signal is turned toward the sea, away from the colony.

5. The weather
Observations are made every three hours, beginning at midnight: pressure, temperature, wind, cloud, \
visibility and the state of the sea. The report is sent by radio on channel 12 and, if the radio is \
out of order, by the satellite telephone that is kept in the blue cabinet. The barometer in the hall \
was a gift of the Danish navy and reads two hectopascals too low, which every newcomer forgets once. \
The highest wind ever measured on the island was 71 metres per second, on the ninth of January 1993, \
a moment before the instrument itself was blown into the sea.

6. Supplies
The supply boat is called the Grey Heron. It comes on every second Thursday, weather permitting, and \
brings food, post, fuel and spare parts. Its skipper will not land when the swell is above one and a \
half metres. The storehouse holds enough for sixty days, and the stock is counted on the first day of \
every month. Drinking water comes from the spring; it is filtered twice and tested every week. The \
diesel tanks hold nine thousand litres, and the generator burns about forty litres a day. The cook \
keeps a small garden behind the south wall, where potatoes, kale and onions grow in soil that was \
carried over in sacks.

7. Emergencies
In a fire the crew meets at the boathouse, and the writer counts heads before anything else is done. \
The nearest rescue helicopter is stationed at Harrow Bay and needs thirty-five minutes to arrive. The \
landing place is the flat rock east of the tower, and it must be kept clear of ropes and barrels at \
all times. The medicine chest is in the kitchen, in the cupboard above the bread. Whoever opens it \
signs the list inside the door. Nobody goes down to the western reef alone, on any day, for any reason.

8. Visitors
Visitors are welcome from May to September, on Saturdays, in groups of at most eight. They climb the \
tower with a member of the crew, and they wear the felt shoes that stand at the bottom of the stairs, \
since the old oak steps are soft. Dogs stay in the boat because of the puffins. There is no charge, \
but the crew is glad of newspapers, fresh fruit and new records for the gramophone.

9. Customs
On the first evening of every watch the crew eats together and the youngest reads aloud from the red \
book. On the longest night of the year all lamps in the houses are put out for one minute, so that \
only the great light burns, in memory of those who were lost on the reef before it was built. The \
island's cat is called Admiral. She has no duties, and performs them with great care.

10. The night watch
The night is divided into three watches of four hours. The first begins at eight in the evening, the \
second at midnight, and the third at four in the morning. Whoever stands the watch climbs to the \
gallery once an hour, looks at the light, the sky and the sea, and writes one line into the log, even \
if there is nothing to say. Ships that pass are noted with their course and, if they answer the radio, \
with their name. Tea and biscuits for the watch stand in the lantern room, and the last watch fills \
the kettle for breakfast. A watch is never handed over by shouting up the stairs: the one who leaves \
and the one who comes stand on the gallery together and agree on what they see.

11. From the history of the station
In its first winter the light was put out by seabirds that flew against the lantern, and since then an \
iron net has protected the glass. In 1903 the schooner Marguerite ran onto the reef in a snowstorm, and \
the writer of that time, Hanna Dahl, brought all fourteen sailors ashore with a rope and a wash tub. Her \
medal hangs in the hall, next to the barometer. Electricity came in 1956, the telephone in 1960 and \
hot water in 1988. The log has been kept without a gap since the first night, and its oldest volumes are \
in the museum at Harrow Bay, where they may be read on request.
"""

QUESTIONS = (
    "What is the supply boat called?",
    "When was the lighthouse built?",
    "Who is the meteorologist?",
)

CHAT = (
    "When is the lens cleaned?",
    "What is it cleaned with?",
    "And what is never used for it?",
    "Thank you. How much does the lens weigh?",
)


def system_message() -> dict[str, str]:
    """The long beginning that every prompt of the demo shares."""
    return {"role": "system", "content": f"{INSTRUCTIONS}\n\n{HANDBOOK}"}
