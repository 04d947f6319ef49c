//! The plots: what happens, in which order, in which words. The notation is explained in `stories`.

/// One kind of story.
pub struct Plot {
    /// Words drawn once, in order, before the story is told.
    pub words: &'static [(&'static str, &'static str)],
    /// Templates told one after the other.
    pub parts: &'static [&'static str],
}

/// Phrases that many plots use.
pub const RULES: &[(&str, &str)] = &[
    (
        "opening",
        "[Once upon a time, there was {a_trait} {kind} named {hero}.\
         |Once upon a time, {a_trait} {kind} named {hero} lived {home}.\
         |There once was {a_trait} {kind} named {hero} who lived {home}.\
         |{Hero} was {a_trait} {kind} who lived {home}.\
         |{Hero} was {a_trait} {kind} who loved to {hobby}.]",
    ),
    (
        "home",
        "[near the {home_place}|{in_home_place}|in a small house near the {home_place}|in an old house {in_home_place}]",
    ),
    ("hobby", "[play|sing|dance|run|read|paint|jump|tell stories|climb|laugh]"),
    (
        "time",
        "[one day|one sunny day|one morning|one cold morning|one windy day|one summer day|one warm evening|one afternoon]",
    ),
    ("sad", "[sad|very sad|upset|so sad]"),
    ("happy", "[happy|very happy|so happy|proud and happy|full of joy]"),
    ("soon", "[Soon,|After a while,|A little later,]"),
    (
        "friends_end",
        "[From that day on, {hero} and {friend} were best friends.\
         |After that, {hero} and {friend} played together every day.\
         |They laughed and played until the sun went down.\
         |{Hero} and {friend} walked home together, side by side.\
         |It was the best day ever.\
         |That night, {hero} went to bed with a big smile.]",
    ),
    (
        "alone_end",
        "[That night, {hero} went to bed with a big smile.\
         |{Hero} smiled all the way home.\
         |It was the best day ever.\
         |{He} told {his} {parent} all about it.\
         |And {hero} never forgot that day.\
         |From that day on, {hero} was not afraid to try new things.]",
    ),
    (
        "thanks",
        "[\"Thank you, {friend}!\" said {hero}.\
         |\"Thank you so much,\" {hero} said to {friend}.\
         |{Hero} gave {friend} a big hug.\
         |{Hero} hugged {friend} and said, \"You are a good friend.\"]",
    ),
    (
        "ask_sad",
        "[\"What is wrong?\" asked {friend}.|\"Why are you sad?\" {fhe} asked.|\"Are you okay?\" asked {friend}.]",
    ),
    (
        "friend_comes",
        "[Just then, {friend_full} came by.|{Soon} {friend_full} came by.|{Soon} {hero} met {friend_full}.|{Friend_full} saw {him} and came over.]",
    ),
];

pub const PLOTS: &[Plot] = &[
    // Something is lost and found.
    Plot {
        words: &[
            ("spot", "[under the bed|behind the door|in the kitchen|under the table]"),
            ("spot2", "[in the yard|on the stairs|in the big box|behind the old chair]"),
            ("hidden", "[under a bush|behind a big rock|in the tall grass|next to an old tree|under a bench]"),
        ],
        parts: &[
            "{opening} {His} favorite thing was {a_toy}.",
            "[{Time}, the {toy} was gone.|{Time}, {hero} could not find the {toy}.\
             |{Time}, {hero} went to the {place}. When {he} came home, the {toy} was gone.]",
            "[{Hero} was {sad}.|{Hero} began to cry.] {He} looked {spot}. {He} looked {spot2}. [But it was not there.|The {toy} was not there.]",
            "{friend_comes} {ask_sad} \"I lost my {toy},\" said {hero}.",
            "[\"I will help you look,\" said {friend}.|\"Do not worry. We will find it,\" said {friend}.|\"Let us look together,\" {friend} said.]",
            "They went to the {place} [and looked everywhere|and looked and looked]. \
             [At last, {friend} saw something {color} {hidden}.|{Soon} {hero} saw something {color} {hidden}.] It was the {toy}!",
            "{Hero} was {happy}. {thanks} {friends_end}",
        ],
    },
    // Something is stuck up high.
    Plot {
        words: &[
            ("high", "[tree|tall tree|roof|old wall]"),
            ("tool", "[a long stick|a ladder|a big box|a rope]"),
        ],
        parts: &[
            "{opening}",
            "{Time}, {hero} was playing with {a_flying} {in_place}. [The wind was strong.|The wind began to blow.] \
             [The {flying} flew up and got stuck in the {high}.|Up, up, up it went, and it got stuck in the {high}.]",
            "[{Hero} jumped and jumped, but {he} could not reach it.|{Hero} tried to climb up, but it was too high.]",
            "{friend_comes} {ask_sad} \"My {flying} is stuck in the {high},\" said {hero}.",
            "{Friend} [thought for a moment|looked up and smiled]. \"I have an idea,\" {fhe} said. {Friend} ran home and came back with {tool}.",
            "[Together they got the {flying} down.|Together, they pulled and pushed, and the {flying} came down.] {thanks}",
            "[They took turns playing with it.|\"Now you can play with it too,\" said {hero}.] {friends_end}",
        ],
    },
    // Sharing food.
    Plot {
        words: &[("size", "[big|sweet|fresh|warm]")],
        parts: &[
            "{opening}",
            "{Time}, {his} {parent} gave {him} a {size} {food}. [\"Yum!\" said {hero}.|It smelled so good.|{Hero} could not wait to eat it.]",
            "{Hero} took the {food} to the {place} [and sat down under a tree|and sat down on a bench]. There {he} saw {friend_full}.",
            "{Friend} looked {sad}. \"[What is wrong|Are you okay]?\" asked {hero}. \"I am so hungry,\" said {friend}. [\"I did not eat today.\"|\"I have no food.\"]",
            "{Hero} looked at the {food}. [{He} wanted to eat it all, but {he} felt sorry for {friend}.|It was {his} favorite, but {friend} was hungry.] \
             {He} cut it in two and gave half to {friend}.",
            "[\"Thank you! You are so kind,\" said {friend}.|\"This is the best {food} ever!\" said {friend}.]",
            "[The {food} was good, but sharing it was even better.|{Hero} learned that sharing makes everyone happy.] {friends_end}",
        ],
    },
    // Being afraid.
    Plot {
        words: &[
            ("fear", "[the dark|the water|the big slide|loud storms|the tall bridge]"),
        ],
        parts: &[
            "{opening} But {he} was afraid of {fear}.",
            "{Time}, [{his} friends laughed and had fun, but {hero} stayed home.|{hero} hid under the bed and would not come out.|{hero} felt so scared that {he} began to cry.]",
            "{His} {parent} sat down next to {him}. \"[Why are you crying|What is wrong], {hero}?\" asked {parent}. \"I am afraid of {fear},\" {he} said.",
            "\"[When I was little, I was afraid too|Everyone is afraid sometimes],\" said {parent}. \"[Take my hand. We will try together|Take a deep breath and try one small step].\"",
            "{Hero} [held {parent}'s hand and took one small step|closed {his} eyes and counted to three]. [Then {he} took one more.|It was not so bad.] \
             [\"I did it!\" {he} said.|\"Look at me! I am brave!\" {he} said.]",
            "{Hero} was not afraid of {fear} anymore. {His} {parent} was {happy}. {alone_end}",
        ],
    },
    // Helping a small animal.
    Plot {
        words: &[
            ("pet", "[bird|kitten|puppy|mouse|duck]"),
            ("trouble", "[cold and wet|lost and scared|hurt and could not move|tired and hungry]"),
        ],
        parts: &[
            "{opening} {He} [loved animals|was always kind to others].",
            "{Time}, {hero} went for a walk {in_place}. {He} heard a small sound. [Under a leaf|Behind a rock|In the grass], there was a little {pet}.",
            "The {pet} was {trouble}. \"Do not be afraid,\" said {hero}. \"I will help you.\"",
            "{Hero} [took the {pet} home in {his} hat|picked it up and took it home]. {He} gave it some [water|milk|food] and made a soft bed for it.",
            "[Every day, {hero} sang to the little {pet}.|{His} {parent} helped {him} take care of it.|Day after day, the {pet} grew stronger.] \
             {Soon} the {pet} felt much better.",
            "[\"It is time for you to go home,\" said {hero}.|Then it was time to say goodbye.] {Hero} was a little sad, but {he} let the {pet} go.",
            "[The next day, the {pet} came back with a flower for {him}.|But the {pet} came back to visit every day.|The {pet} never forgot how kind {hero} was.] [|{alone_end}]",
        ],
    },
    // Building something again.
    Plot {
        words: &[
            ("thing", "[tree house|boat|sand castle|toy car|snowman|bridge]"),
            ("broke", "[fell down|broke into pieces|fell apart]"),
        ],
        parts: &[
            "{opening}",
            "{Time}, {hero} wanted to make a {thing}. [{He} worked all morning.|{He} worked very hard.] But when {he} was done, the {thing} {broke}.",
            "\"Oh no!\" said {hero}. {He} tried again, but it {broke} again. [{Hero} felt {sad}.|{Hero} wanted to give up.]",
            "{friend_comes} \"What are you doing?\" asked {friend}. \"I want to make a {thing}, but it is too hard,\" said {hero}.",
            "\"[Let us try together|Two can do more than one|Do not give up. I can help you],\" said {friend}. \
             {Hero} [held the pieces|found more pieces] and {friend} [put them together|made it strong].",
            "[They worked until it was dark.|They worked and worked.] At last, the {thing} was done, and it did not fall. [It was the best {thing} {in_place}.|\"We did it!\" they said.]",
            "{thanks} {friends_end}",
        ],
    },
    // Learning something.
    Plot {
        words: &[("skill", "[swim|ride a bike|whistle|skate|play the drum|climb a tree|sing a song|count to ten]")],
        parts: &[
            "{opening}",
            "More than anything, {he} wanted to learn how to {skill}. [But it was very hard.|But every time {he} tried, {he} could not do it.]",
            "{Time}, {hero} saw {friend_full} {in_place}. {Friend} could {skill} very well. \"[Can you teach me|How do you do that]?\" asked {hero}.",
            "\"[It takes time|You need to try every day],\" said {friend}. \"[I will show you|Watch me, and do what I do].\"",
            "[{Hero} tried and tried.|The first day, {hero} could not do it. The next day, {he} did a little better.] {He} did not give up.",
            "[Then one day, {hero} could {skill} all by {himself}!|At last, {he} could {skill}!] \"[Look at me|I did it]!\" {he} said. {Friend} clapped. \"[I knew you could do it|You did it],\" said {friend}.",
            "[{Hero} was {happy}.|{Hero} learned that you should never give up.] {friends_end}",
        ],
    },
    // Breaking something and telling the truth.
    Plot {
        words: &[("vase", "[cup|vase|lamp|plate|jar|clock]")],
        parts: &[
            "{opening}",
            "{Time}, {hero} was [running|playing with a ball|dancing|jumping] in the house. Crash! {He} hit the table, and {his} {parent}'s {color} {vase} fell down and broke.",
            "[{Hero} was scared.|{Hero} did not know what to do.] {He} [hid the pieces under the bed|hid the pieces in a box|ran to {his} room and hid].",
            "Later, {parent} asked, \"Where is my {color} {vase}?\" [{Hero} said nothing.|{Hero} looked at the floor.] {He} felt [bad|very bad] inside.",
            "Then {hero} told the truth. \"I broke your {vase}. I am sorry,\" {he} said.",
            "{Parent} [was quiet for a moment|looked at {him}] and gave {him} a hug. \"[Thank you for telling the truth|I am glad that you told me|It was only a {vase}. You are more important],\" said {parent}.",
            "Together they [cleaned up the pieces|fixed the {vase} with glue]. {Hero} felt much better. [From that day on, {hero} always told the truth.|{Hero} learned that it is good to tell the truth.]",
        ],
    },
    // A map and a treasure.
    Plot {
        words: &[
            ("way", "[over the bridge|past the old mill|along the path|through the gate]"),
            ("mark", "[a big rock|an old tree|a tall tree|a little cave]"),
            ("gold", "[gold coins|sweet apples|shiny stones|old toys|funny hats]"),
        ],
        parts: &[
            "{opening}",
            "{Time}, {hero} found an old map [in a box|in a book|under {his} bed]. It showed the way to a treasure {in_place}.",
            "{Hero} ran to {friend_full}. \"[Look! I found a map!|Do you want to find a treasure with me?]\" said {hero}. \"[Let us go!|What are we waiting for?]\" said {friend}.",
            "They went {way} until they came to {mark}. [\"The treasure must be here,\" said {friend}.|\"This is the place,\" said {hero}.] They began to dig.",
            "[They dug and dug.|It was hard work.] {Soon} they found a {color} box. {Hero} opened it. [It was full of {gold}!|Inside, there were {gold}!]",
            "\"[What should we do with it|Who does it belong to]?\" asked {friend}. \"[We will share it with everyone|We found it, so half is for you and half is for me],\" said {hero}.",
            "{friends_end}",
        ],
    },
    // A new friend.
    Plot {
        words: &[("game", "[hide and seek|tag|ball|a new game]")],
        parts: &[
            "{opening} [But {he} had no friends.|{He} wanted to have a friend.]",
            "{Time}, {hero} went to the {place}. {He} saw {a_fkind} sitting all alone. The {fkind} looked {sad}.",
            "{Hero} [felt shy, but {he} walked over|took a deep breath and walked over]. \"Hello, my name is {hero},\" {he} said. \"[What is your name|Who are you]?\"",
            "\"[I am|My name is] {friend},\" said the {fkind}. \"I am new here, and [I do not know anyone|I have no one to play with].\"",
            "\"You can play with me!\" said {hero}. {Friend} [smiled|jumped up with joy]. They played {game} {in_place} [all day long|until it was dark].",
            "[Then {hero} gave {friend} {a_toy}.|Then they ate a {food} together.|They were both {happy}.] {friends_end}",
        ],
    },
    // A birthday gift.
    Plot {
        words: &[
            ("gift", "[card|cake|necklace|picture|pillow|crown|puppet]"),
        ],
        parts: &[
            "{opening} {His} best friend was {a_fkind} named {friend}.",
            "{Time}, it was {friend}'s birthday. {Hero} wanted to give {fhim} {a_toy}, but {he} had no money. [{Hero} was {sad}.|{He} did not know what to do.]",
            "\"[You can make something|The best gift comes from the heart],\" said {his} {parent}. So {hero} [sat down and made a {gift}|worked all night and made a {gift}].",
            "The next day, {hero} went to the party {in_place}. [There were many big gifts.|Everyone had a big gift.] {Hero} felt shy. \"[It is only a {gift}|I made this {gift} for you],\" {he} said.",
            "{Friend} [looked at the {gift}|opened {fhis} eyes wide] and smiled. \"[This is the best gift of all|I love it. You made it just for me]!\" {fhe} said.",
            "{Hero} was {happy}. {friends_end}",
        ],
    },
    // Growing something.
    Plot {
        words: &[("plant", "[flower|pumpkin|carrot|apple tree|rose|bean plant]")],
        parts: &[
            "{opening}",
            "{Time}, {his} {parent} gave {him} a tiny seed. \"[Plant it and take care of it|Put it in the ground and wait],\" said {parent}. \"[One day it will be a big {plant}|It will grow into a {plant}].\"",
            "{Hero} planted the seed {in_place}. Every day {he} gave it water. [But nothing came up.|Day after day, {he} waited and waited.] \"[When will it grow|Why is it so slow]?\" {he} asked.",
            "\"[Good things take time|You have to wait],\" said {parent}. [So {hero} did not give up.|So {hero} sang to the seed every day.]",
            "[Then one morning|At last, one day], {hero} saw a tiny green leaf. \"It is growing!\" {he} said. The leaf grew and grew. {Soon} there was a big {plant} {in_place}.",
            "{Hero} [showed it to|ran to tell] {friend_full}. \"[It is so big|What a beautiful {plant}]!\" said {friend}.",
            "[{Hero} was {happy}.|{Hero} learned that good things take time.] {alone_end}",
        ],
    },
    // A rainy day.
    Plot {
        words: &[
            ("fort", "[house|boat|castle|train]"),
            ("stuff", "[blankets|an old box|pillows|chairs]"),
            ("role", "[captain|pirate|boss]"),
        ],
        parts: &[
            "{opening}",
            "{Time}, {hero} and {friend_full} wanted to go to the {place}. But it began to rain. [They looked out of the window and felt {sad}.|\"Now we can not play,\" said {hero}.]",
            "\"[I have an idea|We can play here],\" said {friend}. \"Let us make a {fort} out of {stuff}!\" They [took|found] [everything they needed|all they could find] and began to work.",
            "{Soon} the {fort} was done. \"I am the {role}!\" said {hero}. {Friend} [laughed and laughed|put on a big hat and laughed]. They played [all day long|until it was dark] and forgot about the rain.",
            "[Then the rain stopped|At last, the sun came out], and there was a rainbow in the sky. \"[Do you want to go out|Can we go out now]?\" asked {friend}. \"[No, this is more fun|Let us play a little more],\" said {hero}.",
            "{friends_end}",
        ],
    },
    // A noise in the night.
    Plot {
        words: &[
            ("sound", "[tap, tap, tap|bump, bump, bump|scratch, scratch|hoo, hoo]"),
            ("cause", "[a branch|a little owl|a tiny mouse|the wind|a small cat]"),
        ],
        parts: &[
            "{opening}",
            "One night, {hero} could not sleep. [It was dark and quiet.|The moon was big and round.] Then {he} heard a sound at the window. \"{Sound}!\"",
            "{Hero} [hid under the blanket|held {his} {toy}]. \"[Is it a monster|Who is there]?\" {he} said. [No one answered.|But the sound did not stop.] \"{Sound}!\"",
            "{Hero} called {his} {parent}. \"There is something at the window,\" {he} said. \"Let us look together,\" said {parent}.",
            "They [walked to the window|took a light] and looked out. It was only {cause}! [{Hero} began to laugh.|\"You are not a monster at all,\" said {hero}.] ",
            "{Parent} [sang {him} a song|told {him} a story] and gave {him} a kiss. \"[Good night|Sleep well], {hero},\" {phe} said. {Hero} closed {his} eyes and slept until morning.",
        ],
    },
];
