// The text that the playground begins with, and small changes to it.

const DOCUMENT = `You are the assistant of the Harbour Inn. Answer in one short sentence, from this handbook only.

Arrival and rooms. Rooms are ready from three in the afternoon, and are left by eleven in the morning. Guests who come early can leave their bags with the porter and take breakfast at no charge. The keys to the eight rooms hang behind the desk; a lost key costs twenty crowns. Rooms one to four look over the water, five and six over the garden, seven and eight over the old market. Extra blankets are in the chest on the landing, and the windows on the sea side must be closed when the wind is up.

Meals. Breakfast is served in the blue room from seven to ten, on Sundays until eleven. The kitchen bakes its own bread; guests who cannot eat wheat should tell the cook the evening before. Soup and cold plates are served at noon. Dinner begins at half past six and is announced with a bell; the table by the stove is kept for families with small children. The bar closes at eleven, an hour later on Fridays and Saturdays.

Boats and walks. The boat to the islands leaves at ten and returns at four, except in January, when it stays in the harbour. Tickets are sold at the desk until nine. The coast path starts behind the boat house and takes three hours to the lighthouse; the lower part is under water at high tide, so ask for the tide table first. Bicycles are lent for half a day, helmets are in the shed, and lamps must be brought back before dark.

House rules. Dogs are welcome in the garden rooms and in the bar, but not at breakfast. Quiet is kept from ten at night. The sauna is heated on Tuesdays and Saturdays from five; towels are in the hall. Post is collected at noon, and the nearest doctor is in Mill Street, five minutes from the market.`;

const QUESTIONS = [
  "When does the boat to the islands leave?",
  "On which days is the sauna heated?",
  "How much does a lost key cost?",
  "Where are dogs welcome?",
];

// Pairs that turn into each other, in the middle of the document.
const WORDS = ["half past six", "half past seven"];

export const EXAMPLE = `${DOCUMENT}\n\nQuestion: ${QUESTIONS[0]}`;

// The prompt with the next question in place of its last line.
export function withOtherQuestion(prompt) {
  const at = prompt.lastIndexOf("\n\nQuestion: ");
  if (at < 0) return `${prompt}\n\nQuestion: ${QUESTIONS[0]}`;
  const asked = QUESTIONS.indexOf(prompt.slice(at + "\n\nQuestion: ".length));
  return `${prompt.slice(0, at)}\n\nQuestion: ${QUESTIONS[(asked + 1) % QUESTIONS.length]}`;
}

// The prompt with one word in its middle changed.
export function withOtherWord(prompt) {
  const [one, other] = prompt.includes(WORDS[0]) ? WORDS : [...WORDS].reverse();
  if (prompt.includes(one)) return prompt.replace(one, other);
  const words = prompt.split(" ");
  words[words.length >> 1] = `${words[words.length >> 1]}x`;
  return words.join(" ");
}
